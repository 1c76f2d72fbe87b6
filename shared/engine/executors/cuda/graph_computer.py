"""Computes decode steps by CUDA graphs, and all others eagerly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.device import to_device
from shared.engine.executors.cuda.decode_graphs import DecodeGraphs, GraphDevice, row_counts
from shared.engine.executors.loading.warm_up import CHECKED_LENS
from shared.engine.executors.step_computer import StepComputer
from shared.engine.models.device_step import DeviceStepInputs, DeviceStepOutput, device_step
from shared.engine.step import StepInputs, StepOutput


class GraphComputer(StepComputer):
    """A `StepComputer` that has graphs once `use_graphs` is called, and does not wait for tokens
    that the device samples before it launches the next step.
    """

    graphs: DecodeGraphs | None = None
    _on: GraphDevice | None = None

    def use_graphs(self, device: GraphDevice, *, max_rows: int, max_graphs: int) -> None:
        """Captures the first graphs, if there is a KV cache."""
        self._check_thread()
        has_experts, self._on = self.model.config.has_experts, device
        most_rows = row_counts(max_rows, is_padded=not has_experts)[-1]
        length = max(most_rows, len(CHECKED_LENS))  # a step of more rows would move it
        self.last_tokens = torch.zeros(length, dtype=torch.int64, device=self._device)
        self.graphs = DecodeGraphs(
            device,
            self._step,
            self.kv_layout,
            self._kinds,
            self.kind_of_layer,
            self.last_tokens,
            self.expert_sums(),
            max_rows=max_rows,
            max_tokens=len(self.model.cos),
            has_experts=has_experts,
            max_graphs=max_graphs,
        )
        if self.kv_cache.numel():
            self.graphs.capture_first()
        else:
            self.graphs.expect_first()

    def has_graphs_left(self) -> bool:
        """Whether graphs may be captured in idle moments."""
        return self.graphs is not None and self.kv_cache.numel() > 0 and self.graphs.has_next()

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures a graph."""
        self._check_thread()
        if self.graphs is not None and self.kv_cache.numel():
            self.graphs.capture_next()

    @torch.inference_mode()
    def download_counts(self) -> Tensor | None:
        """Returns memory that has the `expert_counts` once the device has done what is launched;
        None without experts.
        """
        counts = self.counted_experts()
        return counts if counts is None or self._on is None else self._on.download(counts)

    def forget_graphs(self) -> None:
        """Must be called when the KV cache is replaced, or weights get other addresses."""
        if self.graphs is not None:
            self.graphs.clear()

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Callable[[], StepOutput]:
        """The output may be asked for once the device has done what is launched."""
        began_at = self._clock.now()
        done = self._computed(inputs)
        if done.token_ids is None or inputs.prompt_logprobs or inputs.pooling:
            output = self.output(done, inputs, began_at)
            self._keep_tokens(output.token_ids)
            return lambda: output
        token_ids = done.token_ids if self._on is None else self._on.download(done.token_ids)
        return lambda: StepOutput(self._drawn(token_ids))

    def _computed(self, inputs: StepInputs) -> DeviceStepOutput:
        self._check_thread()
        graph = None if self.graphs is None else self.graphs.graph_of(inputs)
        if graph is None:
            return super()._computed(inputs)
        self._copy_blocks(inputs)
        return graph.run(inputs)

    def _step(self, inputs: DeviceStepInputs) -> DeviceStepOutput:
        return device_step(self.model, self.kv_slots(), inputs)

    def _keep_tokens(self, token_ids: list[int]) -> None:
        """Writes tokens that the host has sampled where the next step reads them."""
        if self.last_tokens is not None and token_ids:
            sampled = to_device(np.array(token_ids), self._device)
            self.last_tokens[: len(token_ids)] = sampled
