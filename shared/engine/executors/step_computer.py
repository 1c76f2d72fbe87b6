"""Computes steps of a torch model, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import to_device
from kernels.ops import copy_blocks
from shared.clock import MonotonicClock
from shared.engine.kv.kv_copies import KvCopies, any_thread
from shared.engine.layers.attention_inputs import LayerKind
from shared.engine.layers.moe import MoeMlp
from shared.engine.models.decoder import DecoderLayer
from shared.engine.models.device_step import (
    MISROUTED,
    DeviceStepInputs,
    DeviceStepOutput,
    Model,
    device_step,
    hidden_states,
)
from shared.engine.sampling.hidden_state_outputs import pooled, prompt_logprobs
from shared.engine.sampling.mask_words import join_masks
from shared.engine.sampling.sampler import sample_tokens
from shared.engine.step import StepInputs, StepOutput
from shared.kv_layout import KvLayout
from shared.messages import TokenLogprobs


class StepComputer(KvCopies):
    """Computes steps and copies KV on the calling thread, on the model's device.

    `kind_of_layer`: the index of each layer's inputs among those of a step.
    """

    last_tokens: Tensor | None = None  # as in `DeviceStepInputs`

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        kv_layout: KvLayout,
        *,
        check_thread: Callable[[], None] = any_thread,
    ) -> None:
        super().__init__(kv_cache, kv_layout, check_thread)
        self.model = model
        of_layers = [
            LayerKind(group, layer.reach, layer.query_temperature)
            for (group, _), layer in zip(kv_layout.places, model.layer_config.layers, strict=True)
        ]
        self._kinds = tuple(dict.fromkeys(of_layers))  # see build_attention_inputs
        self.kind_of_layer = [self._kinds.index(each) for each in of_layers]
        self._slot_of_layer = [slot for _, slot in kv_layout.places]
        self._clock = MonotonicClock()

    def run(self, inputs: StepInputs) -> StepOutput:
        return self.launch(inputs)()

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Callable[[], StepOutput]:
        """Returns what gives the output, once the device has computed what was launched."""
        began_at = self._clock.now()
        output = self.output(self._computed(inputs), inputs, began_at)
        return lambda: output

    @torch.inference_mode()
    def output(
        self, done: DeviceStepOutput, inputs: StepInputs, began_at: float = 0.0
    ) -> StepOutput:
        """Returns the results of a step that the device has computed, or will have."""
        token_ids, logprobs, late_rows = self._tokens(done, inputs, began_at)
        vocab_size = self.model.config.vocab_size
        return StepOutput(
            token_ids,
            logprobs,
            prompt_logprobs(done.hidden, inputs, self.model.logits, vocab_size=vocab_size),
            pooled(done.hidden, inputs, self.model.normed),
            late_rows,
        )

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """[R, vocab_size] FP32."""
        logits = device_step(*self._operands(inputs)).logits
        assert logits is not None, "the step samples nothing"
        return logits

    def hidden(self, inputs: StepInputs) -> Tensor:
        """Returns the hidden states of all tokens, before the final norm: [T, hidden_size]."""
        return hidden_states(*self._operands(inputs))

    def device_inputs(
        self, inputs: StepInputs, *, samples_on_device: bool = False
    ) -> DeviceStepInputs:
        kinds = self._kinds, self.kind_of_layer
        return DeviceStepInputs.build(
            inputs,
            self._device,
            *kinds,
            samples_on_device=samples_on_device,
            last_tokens=self.last_tokens,
            dtype=self.model.dtype,
        )

    def kv_slots(self) -> list[Tensor]:
        """Returns the cache of each layer."""
        slots = self.kv_cache.unbind(0)
        return [slots[slot] for slot in self._slot_of_layer]

    @torch.inference_mode()
    def expert_counts(self) -> NDArray[np.int64] | None:
        """[layers with experts, experts]: the tokens of each since the start; None without experts.

        Waits for the device.
        """
        counts = self.counted_experts()
        return None if counts is None else counts.cpu().numpy()

    def counted_experts(self) -> Tensor | None:
        """Returns the `expert_counts` on the device."""
        self._check_thread()
        sums = self.expert_sums()
        return torch.stack(sums).diff(dim=1) if sums else None

    def expert_sums(self) -> list[Tensor]:
        """Returns `MoeMlp.summed_offsets` of each layer with experts."""
        moes = [layer.mlp for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        return [mlp.summed_offsets for mlp in moes if isinstance(mlp, MoeMlp)]

    def _computed(self, inputs: StepInputs) -> DeviceStepOutput:
        return device_step(
            *self._operands(inputs, samples_on_device=self._samples_on_device(inputs))
        )

    @torch.inference_mode()
    def _operands(
        self, inputs: StepInputs, *, samples_on_device: bool = False
    ) -> tuple[Model, list[Tensor], DeviceStepInputs, Tensor | None]:
        """Copies blocks, and returns the operands of `device_step`."""
        self._check_thread()
        self._copy_blocks(inputs)
        own = self.device_inputs(inputs, samples_on_device=samples_on_device)
        return self.model, self.kv_slots(), own, self._entering(inputs)

    def _copy_blocks(self, inputs: StepInputs) -> None:
        if inputs.block_copies:
            copies = np.array(inputs.block_copies).T.copy()  # [2, N]
            copy_blocks(self.kv_cache, *to_device(copies, self._device))

    def _entering(self, inputs: StepInputs) -> Tensor | None:
        """Returns the input of the first layer, if it is not the embedding of the tokens."""
        return None

    def _samples_on_device(self, inputs: StepInputs) -> bool:
        """Whether the step samples its tokens on the device, before anything is read."""
        return inputs.sampling.is_plain

    def _tokens(
        self, done: DeviceStepOutput, inputs: StepInputs, began_at: float
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        """Returns token ids, logprobs and late rows, as in `StepOutput`."""
        if done.sampled is None:
            return [], [], frozenset()
        if done.token_ids is not None:
            return self._drawn(done.token_ids), [], frozenset()
        assert done.logits is not None
        try:  # the flags are read after the tokens: the device has computed both
            return self._sample_logits(done.logits, inputs, began_at)
        finally:
            self._check_routing(done.is_misrouted is not None and bool(done.is_misrouted.any()))

    def _drawn(self, token_ids: Tensor) -> list[int]:
        found: list[int] = token_ids.tolist()
        self._check_routing(MISROUTED in found)
        return found

    def _check_routing(self, is_misrouted: bool) -> None:
        """Raises FloatingPointError if a router's logits were no numbers."""
        if is_misrouted:
            raise FloatingPointError("a router's logits are NaN or infinite")

    def _sample_logits(
        self, logits: Tensor, inputs: StepInputs, began_at: float
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        masks = join_masks(
            inputs.sampling.masks, self._clock, lambda: self._forward_time_s(began_at)
        )
        return *sample_tokens(logits, inputs.sampling, masks), masks.late_rows

    def _forward_time_s(self, began_at: float) -> float:
        """Waits until the device has computed the forward pass."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._clock.now() - began_at
