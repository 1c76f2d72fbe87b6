"""A CUDA device on CPU tensors: a driver that records its calls, and graphs that compute again.

Processes of ranks import it, so it imports neither pytest nor transformers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.step_queue import MOST_AHEAD
from shared.engine.models.device_step import DeviceStepOutput
from tests.kernels.support.compiled_first import compile_first

INDEX = 3


@dataclass(eq=False)
class FakeEvent:
    marks: list[FakeEvent]
    is_done: Callable[[], bool] = lambda: True

    def query(self) -> bool:
        return self.is_done()

    def record(self) -> None:
        self.marks.append(self)

    def synchronize(self) -> None: ...


@dataclass
class FakeStream:
    done: list[object]

    def wait_event(self, event: FakeEvent) -> None:
        self.done.append(event)

    def synchronize(self) -> None:
        self.done.append("synchronize")

    @contextmanager
    def current(self) -> Iterator[None]:
        self.done.append("begin")
        try:
            yield
        finally:
            self.done.append("end")


@dataclass
class FakeDriver:
    """A fake `torch.cuda`: every thread starts on device 0; `free` gives the free bytes."""

    free: Callable[[], int] = lambda: 1 << 20
    total: int = 1 << 30
    is_late: bool = False  # no event has happened
    reserved: int = 0  # bytes that torch holds
    fractions: list[float] = field(default_factory=list)  # limits of what it may hold
    bound: dict[str, int] = field(default_factory=dict)  # thread name -> device
    calls: list[str] = field(default_factory=list)
    marks: list[FakeEvent] = field(default_factory=list)  # events in the order of their records
    copies: list[object] = field(default_factory=list)  # what a copy stream does
    priorities: list[int] = field(default_factory=list)  # of streams; that of the steps is 0
    _current: threading.local = field(default_factory=threading.local)

    def set_device(self, device: int) -> None:
        self._current.device = device
        self.bound[threading.current_thread().name] = device

    def current_device(self) -> int:
        return getattr(self._current, "device", 0)

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"8a2c-{device}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert device == INDEX
        self.calls.append("mem_get_info")
        return self.free(), self.total

    def memory_reserved(self, device: int) -> int:
        assert device == INDEX
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        assert device == INDEX
        self.fractions.append(fraction)

    def Stream(self, device: int, priority: int) -> FakeStream:  # noqa: N802
        assert device == INDEX
        self.priorities.append(priority)
        return FakeStream(self.copies)

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self.marks, lambda: not self.is_late)

    def stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        return stream.current()


class Replays:
    """A `GraphDevice` of the CPU. Like a graph, it keeps nothing that a step reads."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.num_captured = error, 0
        self.rows: list[int] = []  # of each captured step

    def empty(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        hosts = torch.empty((MOST_AHEAD, num_bytes), dtype=torch.uint8)
        return hosts, torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def download(self, values: Tensor) -> Tensor:
        return values.clone()

    def capture(
        self, call: partial[DeviceStepOutput]
    ) -> tuple[Callable[[], None], DeviceStepOutput]:
        if self.error is not None:
            raise self.error
        self.num_captured += 1
        self.rows.append(len(call.args[0].token_ids))
        output, step, inputs = call(), call.func, weakref.ref(*call.args)

        def replay() -> None:
            read = inputs()
            assert read is not None, "the memory that the graph reads is free"
            for kept, new in zip(output, step(read), strict=True):
                if kept is not None:
                    kept.copy_(new)

        return replay, output


def load(
    folder: Path,
    graphs: Replays | None = None,
    *,
    max_graphs: int = 64,
    driver: FakeDriver | None = None,
    answers_apart: bool = False,
    **options: object,
) -> CudaExecutor:
    device = CudaDevice(INDEX, torch.device("cpu"), driver or FakeDriver(), lambda _: None)
    given = {"dtype": "float32", "kv_cache_bytes": 1 << 22, "max_batch_tokens": 64} | options
    given.setdefault("parked_weights", "device")  # compiled loops hold addresses of packed weights
    chosen = LoadOptions(**given, max_sequences=16)  # type: ignore[arg-type]
    for head_dim in (20, 32):  # a cache of copies, and one that is read in place
        compile_first(chosen.dtype, head_dim=head_dim)
    executor = CudaExecutor.load(folder, chosen, device, answers_apart=answers_apart)
    if graphs is not None:
        executor.computer.use_graphs(graphs, max_rows=16, max_graphs=max_graphs)
    return executor
