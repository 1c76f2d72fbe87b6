"""A step of a model as one function on its device: embed, layers, choice of rows, head, sample.

All inputs are on the device before it begins, and a dense model's step waits for nothing there, so
it can be captured in a CUDA graph. The eager step is the same function. On the CPU, and elsewhere
without Triton, sampling reads results in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import to_device
from kernels.ops import sample
from shared.engine.layers.attention_inputs import (
    AttentionInputs,
    LayerKind,
    build_attention_inputs,
)
from shared.engine.models.decoder import Decoder
from shared.engine.models.rank_decoder import RankDecoder
from shared.engine.sampling.sampler import sampling_columns
from shared.engine.step import StepInputs

MISROUTED = -1  # stands for a token id

Model: TypeAlias = Decoder | RankDecoder


@dataclass(frozen=True, slots=True, weakref_slot=True)
class DeviceStepInputs:
    token_ids: Tensor  # [T] void where `token_sources` has another place
    positions: Tensor  # [T]
    attention: tuple[AttentionInputs, ...]  # an element for each layer
    logits_rows: Tensor | None  # [R] of the batch; None: nothing is sampled
    samples_on_device: bool  # False: the host samples from the logits
    sampling: list[Tensor] | None  # [R] each; None: all rows are greedy
    # Tokens that the step before has sampled, first; the step writes its own there. None: the host
    # knows all tokens.
    last_tokens: Tensor | None = None
    token_sources: Tensor | None = None  # [T] places in `last_tokens` and `token_ids`, joined
    # [N] rows of the batch and [N, hidden_size] their vectors, in place of their ids' embeddings
    embedded: tuple[Tensor, Tensor] | None = None

    @classmethod
    def build(
        cls,
        inputs: StepInputs,
        device: torch.device,
        kinds: Sequence[LayerKind],
        kind_of_layer: Sequence[int],
        *,
        samples_on_device: bool,
        last_tokens: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Copies `inputs` to the device. `samples_on_device` requires that nothing else changes the
        logits. `dtype` is the model's.
        """
        sampling, columns = inputs.sampling, None
        if samples_on_device and not sampling.is_plain_greedy:
            columns = sampling_columns(sampling, device)
        has_rows = sampling.num_rows > 0
        of_kinds = build_attention_inputs(inputs, device, kinds)
        return cls(
            token_ids=to_device(inputs.input_ids, device),
            positions=to_device(inputs.positions, device),
            attention=tuple(of_kinds[kind] for kind in kind_of_layer),
            logits_rows=to_device(sampling.logits_indices, device) if has_rows else None,
            samples_on_device=samples_on_device,
            sampling=columns,
            last_tokens=last_tokens,
            token_sources=_sources_on(device, inputs, last_tokens),
            embedded=_embedded_on(device, inputs, dtype),
        )


def _sources_on(
    device: torch.device, inputs: StepInputs, last_tokens: Tensor | None
) -> Tensor | None:
    """Returns None if the host knows all tokens."""
    if last_tokens is None or (inputs.input_ids >= 0).all():
        return None
    return to_device(token_sources(inputs.input_ids, len(last_tokens)), device)


def _embedded_on(
    device: torch.device, inputs: StepInputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    found = inputs.embedded
    if found is None:
        return None
    vectors = torch.frombuffer(bytearray(found.vectors), dtype=dtype).view(len(found.rows), -1)
    return to_device(found.rows, device), vectors.to(device)


def token_sources(input_ids: NDArray[np.int64], num_last: int) -> NDArray[np.int64]:
    """Returns `DeviceStepInputs.token_sources` of `StepInputs.input_ids`."""
    own = num_last + np.arange(len(input_ids))
    return np.where(input_ids < 0, -1 - input_ids, own)


class DeviceStepOutput(NamedTuple):
    hidden: Tensor  # [T, hidden_size] before the final norm
    sampled: Tensor | None = None  # [R, hidden_size] the rows that sample
    logits: Tensor | None = None  # [R, vocab_size] FP32, if the host samples
    token_ids: Tensor | None = None  # [R] int64, if the device does; MISROUTED for such rows
    is_misrouted: Tensor | None = None  # [R] bool, of a model with experts


@torch.inference_mode()
def device_step(
    model: Model,
    kv_slots: Sequence[Tensor],
    inputs: DeviceStepInputs,
    entering: Tensor | None = None,
) -> DeviceStepOutput:
    """Computes a step. `kv_slots` has the cache of each layer; `entering` is as in
    `hidden_states`.
    """
    hidden = hidden_states(model, kv_slots, inputs, entering)
    if inputs.logits_rows is None:
        return DeviceStepOutput(hidden)
    sampled = hidden.index_select(0, inputs.logits_rows)
    is_misrouted = _is_misrouted(model, sampled)
    if not inputs.samples_on_device:
        return DeviceStepOutput(hidden, sampled, model.logits(sampled), None, is_misrouted)
    token_ids = _sample(model, sampled, inputs.sampling)
    if is_misrouted is not None:
        token_ids = token_ids.masked_fill(is_misrouted, MISROUTED)
    if inputs.last_tokens is not None:  # a misrouted row's next step is void, but is computed
        torch.clamp(token_ids, min=0, out=inputs.last_tokens[: len(token_ids)])
    return DeviceStepOutput(hidden, sampled, None, token_ids, is_misrouted)


def _is_misrouted(model: Model, sampled: Tensor) -> Tensor | None:
    """[R] rows whose tokens have no choice of experts, because a router's logits were no numbers:
    all that follows is NaN.
    """
    return sampled.isnan().any(dim=1) if model.config.has_experts else None


@torch.inference_mode()
def hidden_states(
    model: Model,
    kv_slots: Sequence[Tensor],
    inputs: DeviceStepInputs,
    entering: Tensor | None = None,
) -> Tensor:
    """Returns the hidden states [T, hidden_size] after the layers.

    `entering` has those of an earlier stage, in the same shape; None: the tokens are embedded here.
    """
    x = _embedding(model, inputs) if entering is None else entering
    return model.run_layers(x, inputs.positions, kv_slots, inputs.attention)


def _embedding(model: Model, inputs: DeviceStepInputs) -> Tensor:
    """[T, hidden_size]."""
    x = model.embed(_token_ids(inputs))
    return x if inputs.embedded is None else x.index_copy_(0, *inputs.embedded)


def _token_ids(inputs: DeviceStepInputs) -> Tensor:
    if inputs.token_sources is None or inputs.last_tokens is None:
        return inputs.token_ids
    return torch.cat((inputs.last_tokens, inputs.token_ids)).index_select(0, inputs.token_sources)


def _sample(model: Model, sampled: Tensor, columns: list[Tensor] | None) -> Tensor:
    """[R] token ids."""
    if columns is None:
        return model.argmax_tokens(sampled)
    return sample(model.logits(sampled), *columns)
