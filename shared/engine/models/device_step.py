"""A step of a model as one function on its device: embed, layers, choice of rows, head, sample.

All inputs are on the device before it begins, and a dense model's step waits for nothing there, so
it can be captured in a CUDA graph. The eager step is the same function. On the CPU, and elsewhere
without Triton, sampling reads results in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

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
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    attention: tuple[AttentionInputs, ...]  # an element for each layer
    logits_rows: Tensor | None  # [R] of the batch; None: nothing is sampled
    samples_on_device: bool  # False: the host samples from the logits
    sampling: list[Tensor] | None  # [R] each; None: all rows are greedy

    @classmethod
    def build(
        cls,
        inputs: StepInputs,
        device: torch.device,
        kinds: Sequence[LayerKind],
        kind_of_layer: Sequence[int],
        *,
        samples_on_device: bool,
    ) -> Self:
        """Copies `inputs` to the device. `samples_on_device` requires that nothing else changes the
        logits.
        """
        sampling, columns = inputs.sampling, None
        if samples_on_device and not sampling.is_plain_greedy:
            columns = sampling_columns(sampling, device)
        has_rows = sampling.num_rows > 0
        of_kinds = build_attention_inputs(inputs, device, kinds)
        return cls(
            token_ids=torch.from_numpy(inputs.input_ids).to(device),
            positions=torch.from_numpy(inputs.positions).to(device),
            attention=tuple(of_kinds[kind] for kind in kind_of_layer),
            logits_rows=torch.from_numpy(sampling.logits_indices).to(device) if has_rows else None,
            samples_on_device=samples_on_device,
            sampling=columns,
        )


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
    x = model.embed(inputs.token_ids) if entering is None else entering
    return model.run_layers(x, inputs.positions, kv_slots, inputs.attention)


def _sample(model: Model, sampled: Tensor, columns: list[Tensor] | None) -> Tensor:
    """[R] token ids."""
    if columns is None:
        return model.argmax_tokens(sampled)
    return sample(model.logits(sampled), *columns)
