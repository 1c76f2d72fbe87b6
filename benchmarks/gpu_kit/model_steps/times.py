"""Times of a step: of the device by replays of a CUDA graph, of the host by eager calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_kit.model_steps.waits import first_wait
from benchmarks.gpu_kit.session import Session

MAX_REASON = 300  # characters
EAGER_STEPS = 5
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh")

Call = Callable[[], object]


def device_time(session: Session, call: Call, repetitions: int = 20) -> dict[str, Any]:
    """Returns the columns `measured_s` and `is_captured`. What cannot be captured is timed by
    events around eager calls, with the reason and the operation that waits. Nothing is run dry.
    """
    if session.is_dry:
        return {"measured_s": None}
    try:
        graph = captured(call)
    except RuntimeError as error:
        seconds = session.seconds(call, repetitions)
        reason = str(error)[:MAX_REASON]
        waits = first_wait(call)
        return {"measured_s": seconds, "is_captured": False, "reason": reason, "waits": waits}
    return {"measured_s": session.seconds(graph.replay, repetitions), "is_captured": True}


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """Captures a step in a graph. Other threads may use the device meanwhile. Raises RuntimeError
    if something waits.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # loads kernels, and makes what the libraries make once for a stream
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


def host_time(session: Session, call: Call, num_launches: int) -> dict[str, Any]:
    """Returns columns of steps before each of which the device is idle, so that its queue never
    holds the host back: the host's time, that of host and device, and the host's for a launch.
    Nothing is run dry.
    """
    if session.is_dry:
        return {}
    issued, done = zip(*(_eager(session, call) for _ in range(EAGER_STEPS)), strict=True)
    host_s = statistics.median(issued)
    return {
        "host_ms": round(host_s * 1e3, 3),
        "eager_ms": round(statistics.median(done) * 1e3, 3),
        "us_per_launch": round(host_s / num_launches * 1e6, 2),
    }


def _eager(session: Session, call: Call) -> tuple[float, float]:
    """Returns the seconds until the step is issued, and until it is done."""
    session.synchronize()
    started = time.perf_counter()
    call()
    issued_s = time.perf_counter() - started
    session.synchronize()
    return issued_s, time.perf_counter() - started


def count_launches(call: Call) -> dict[str, int]:
    """Returns the columns: launches of Triton and of torch in one call, which also
    compiles new kernels.
    """
    from triton.runtime.jit import JITFunction

    run, by_torch, num_by_triton = JITFunction.run, _Launches(), 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_by_triton
        num_by_triton += 1
        return run(*args, **kwargs)

    JITFunction.run = counted
    try:
        with by_torch:
            call()
    finally:
        JITFunction.run = run
    return {"triton_launches": num_by_triton, "torch_launches": by_torch.num}


class _Launches(TorchDispatchMode):
    """Counts operations that are neither views nor allocations. Some launch several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler for a mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in aliases)
        self.num += not is_view and func.overloadpacket.__name__ not in ALLOCATIONS
        return func(*args, **(kwargs or {}))
