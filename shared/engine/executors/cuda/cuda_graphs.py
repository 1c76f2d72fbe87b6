"""Captures CUDA graphs on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from shared.engine.executors.step_queue import MOST_AHEAD
from shared.engine.models.device_step import DeviceStepOutput

MAX_FAILED = 4  # failed captures after which none is tried: each keeps its memory


class CudaGraphs:
    """A `GraphDevice` on CUDA. All graphs share memory: one runs at a time, and its output is
    copied before the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._on = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def empty(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        hosts = torch.empty((MOST_AHEAD, num_bytes), dtype=torch.uint8, pin_memory=True)
        return hosts, torch.empty(num_bytes, dtype=torch.uint8, device=self._on)

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def capture(
        self, call: partial[DeviceStepOutput]
    ) -> tuple[Callable[[], None], DeviceStepOutput]:
        if len(self._failed) >= MAX_FAILED:
            raise RuntimeError(f"{MAX_FAILED} captures have failed")
        if not self._graphs:  # torch ends a pool with its last graph, and then admits none there
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with self._on_own_stream():
            call()  # loads kernels, and makes what the libraries make once for a stream
            self._stream.synchronize()
            try:
                output = self._captured(graph, call)
            except BaseException:
                self._abandon(graph)
                raise
        self._graphs.add(graph)
        return graph.replay, output

    def _captured(
        self, graph: torch.cuda.CUDAGraph, call: partial[DeviceStepOutput]
    ) -> DeviceStepOutput:
        # other threads may allocate and copy meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            return call()
        finally:
            graph.capture_end()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends what a failed `capture_end` leaves: torch's allocator still takes the memory of this
        capture from its pool, admits no other capture there, and frees nothing that it caches when
        memory is short. It asks the graph about each allocation, so the graph stays.
        """
        self._failed.append(graph)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # older ones have another name
        if end is not None:
            with suppress(RuntimeError):  # it has ended, or did not begin
                end(self._on.index, self._pool)
        self._graphs.clear()  # the next one begins another pool

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Later work waits for that of the stream also after an error: it reads inputs whose memory
        is used again.
        """
        current = torch.cuda.current_stream(self._on)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
