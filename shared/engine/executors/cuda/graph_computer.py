"""Computes decode steps by CUDA graphs, and all others eagerly."""

from __future__ import annotations

import torch

from shared.engine.executors.cuda.decode_graphs import DecodeGraphs, GraphDevice
from shared.engine.executors.step_computer import StepComputer
from shared.engine.models.device_step import DeviceStepInputs, DeviceStepOutput, device_step
from shared.engine.step import StepInputs


class GraphComputer(StepComputer):
    """A `StepComputer` that has graphs once `use_graphs` is called."""

    graphs: DecodeGraphs | None = None

    def use_graphs(self, device: GraphDevice, *, max_rows: int, max_graphs: int) -> None:
        """Captures the first graphs, if there is a KV cache."""
        self._check_thread()
        self.graphs = DecodeGraphs(
            *(device, self._step, self.kv_layout, self._kinds, self.kind_of_layer),
            max_rows=max_rows,
            max_tokens=len(self.model.cos),
            has_experts=self.model.config.has_experts,
            max_graphs=max_graphs,
        )
        if self.kv_cache.numel():
            self.graphs.capture_first()

    def has_graphs_left(self) -> bool:
        """Whether graphs may be captured in idle moments."""
        return self.graphs is not None and self.kv_cache.numel() > 0 and self.graphs.has_next()

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures a graph. Experts do not count the padding of its first call."""
        self._check_thread()
        if self.graphs is None or not self.kv_cache.numel():
            return
        sums = self._expert_sums()
        before = [each.clone() for each in sums]
        self.graphs.capture_next()
        for each, counted in zip(sums, before, strict=True):
            each.copy_(counted)

    def forget_graphs(self) -> None:
        """Must be called when the KV cache is replaced."""
        if self.graphs is not None:
            self.graphs.clear()

    def _computed(self, inputs: StepInputs) -> DeviceStepOutput:
        self._check_thread()
        graph = None if self.graphs is None else self.graphs.graph_of(inputs)
        if graph is None:
            return super()._computed(inputs)
        self._copy_blocks(inputs)
        return graph.run(inputs)

    def _step(self, inputs: DeviceStepInputs) -> DeviceStepOutput:
        return device_step(self.model, self.kv_slots(), inputs)
