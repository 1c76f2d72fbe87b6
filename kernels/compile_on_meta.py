"""Compiles Triton's kernels without launching them.

Triton finds or compiles a kernel by its arguments' types, alignment and constants; the values of
tensors play no part. A meta tensor (torch's device without memory) at the same offset has all
of these. So an operation on meta tensors, which stand for those of the thread's device, takes its
real path up to the launch, in microseconds and without memory.

Kernels are compiled and their launchers built on several threads: what takes the time, Triton's
passes, ptxas and the C compiler, needs no interpreter lock.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest.mock import patch

from torch import Tensor

MAX_THREADS = 8


@contextmanager
def compiling_on_meta(init_thread: Callable[[], None]) -> Iterator[None]:
    """Compiles kernels inside the context: a launch with a meta tensor lets its kernel be compiled
    for the thread's device, or found in Triton's cache; at the end all are compiled and loaded.
    Other launches run, on all threads. `init_thread` makes a thread's device that of the caller.
    """
    from triton import AsyncCompileMode
    from triton.compiler import CompiledKernel
    from triton.runtime._async_compile import FutureKernel, active_mode
    from triton.runtime.jit import JITFunction

    run, found = JITFunction.run, dict[int, Any]()

    def run_or_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not any(isinstance(each, Tensor) and each.is_meta for each in args):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        token = active_mode.set(mode)
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        finally:
            active_mode.reset(token)
        if isinstance(kernel, CompiledKernel | FutureKernel):
            found[id(kernel)] = kernel
        return kernel

    with (
        ThreadPoolExecutor(_num_threads(), "compile-kernel", initializer=init_thread) as pool,
        _parsing_alone(),
    ):
        mode = AsyncCompileMode(pool)
        with patch.object(JITFunction, "run", run_or_compile):
            yield
        list(pool.map(_load, found.values()))  # begun after all compilations: none waits for it


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _load(kernel: Any) -> None:
    """Builds a kernel's launcher and loads its code. Raises what its compilation has raised."""
    from triton.runtime._async_compile import FutureKernel

    if isinstance(kernel, FutureKernel):  # that of Triton 3.6 is no stand-in for its kernel
        kernel = kernel.result()
    _ = kernel.run


@contextmanager
def _parsing_alone() -> Iterator[None]:
    """Serialises `ast.parse`. Before Python 3.12 all threads share one count of its recursion
    depth, and calls on other threads make it raise SystemError.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    parse, lock = ast.parse, Lock()

    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    with patch.object(ast, "parse", parse_alone):
        yield
