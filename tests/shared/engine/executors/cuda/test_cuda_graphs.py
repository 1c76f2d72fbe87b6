"""Captures of graphs, with a fake CUDA: what a failed one leaves."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from shared.engine.executors.cuda.cuda_graphs import MAX_FAILED, CudaGraphs

ON = torch.device("cuda", 3)


class FakeStream:
    def __init__(self, *_: object) -> None:
        self.waited: list[FakeStream] = []

    def synchronize(self) -> None: ...

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


class FakeCuda:
    """The part of torch that `CudaGraphs` uses. A pool takes one capture at a time, and none after
    the last of its graphs has ended.
    """

    def __init__(self) -> None:
        self.default = FakeStream()
        self.recording: list[object] = []
        self.is_invalidated = False
        self.num_pools = 0
        self.num_graphs = Counter[object]()  # of each pool

    def pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    def end(self, device: int, pool: object) -> None:
        assert device == ON.index
        if pool not in self.recording:
            raise RuntimeError("not currently recording")
        self.recording.remove(pool)

    def stream(self, _: FakeStream) -> AbstractContextManager[None]:
        return nullcontext()

    def graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.pool = cuda, None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        if pool in self.cuda.recording:
            raise RuntimeError("already recording to mempool_id")
        if pool in self.cuda.num_graphs and not self.cuda.num_graphs[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pool = pool
        self.cuda.num_graphs[pool] += 1
        self.cuda.recording.append(pool)

    def capture_end(self) -> None:
        if self.cuda.is_invalidated:  # before torch ends the recording
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.recording.remove(self.pool)

    def replay(self) -> None: ...

    def __del__(self) -> None:
        self.cuda.num_graphs[self.pool] -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", cuda.pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: cuda.default)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end, raising=False)
    return cuda


def test_failed_capture_leaves_the_allocator_and_others_as_they_were(cuda: FakeCuda) -> None:
    graphs, calls = CudaGraphs(ON), []

    def step() -> str:
        calls.append(1)
        cuda.is_invalidated = len(calls) == 2  # the second call is captured
        return "output"

    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(partial(step))  # type: ignore[arg-type]
    assert not cuda.recording
    assert graphs.capture(partial(step))[1] == "output"  # type: ignore[arg-type, comparison-overlap]
    assert not cuda.recording


def test_graphs_share_a_pool_until_the_last_one_ends(cuda: FakeCuda) -> None:
    graphs = CudaGraphs(ON)
    replays = [graphs.capture(partial(str, "output")) for _ in range(2)]  # type: ignore[arg-type]
    assert len(cuda.num_graphs) == 1
    replays.clear()  # the KV cache is replaced
    assert graphs.capture(partial(str, "output"))[1] == "output"  # type: ignore[arg-type, comparison-overlap]
    assert len(cuda.num_graphs) == 2


def test_captures_end_after_some_have_failed(cuda: FakeCuda) -> None:
    graphs, calls = CudaGraphs(ON), []
    cuda.is_invalidated = True
    for _ in range(2 * MAX_FAILED):
        with pytest.raises(RuntimeError):
            graphs.capture(partial(calls.append, 1))  # type: ignore[arg-type]
    assert len(calls) == 2 * MAX_FAILED  # two of each capture


def test_later_steps_wait_for_a_first_call_that_raises(cuda: FakeCuda) -> None:
    """Its kernels may still read inputs whose memory is used again."""
    graphs = CudaGraphs(ON)
    with pytest.raises(ZeroDivisionError):
        graphs.capture(partial(divmod, 1, 0))  # type: ignore[arg-type]
    assert cuda.default.waited == [graphs._stream]
