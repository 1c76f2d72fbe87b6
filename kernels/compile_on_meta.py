"""Compiles Triton's kernels by their keys, without running them.

A kernel's key has the dtypes, alignments and constants of its arguments, and a meta tensor has all
of these. So an operation on meta tensors, which stand for those of the thread's device, takes its
real path up to the launch, in microseconds and without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor


@contextmanager
def compiling_on_meta() -> Iterator[None]:
    """Compiles kernels inside the context: a launch with a meta tensor compiles its kernel for the
    thread's device, or finds it in Triton's cache, and loads it. Other launches run, on all
    threads.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def run_or_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_meta = any(isinstance(each, Tensor) and each.is_meta for each in args)
        kernel = run(self, *args, grid=grid, warmup=warmup or is_meta, **kwargs)
        if is_meta and isinstance(kernel, CompiledKernel):
            _ = kernel.run  # builds its launcher and loads its code
        return kernel

    with patch.object(JITFunction, "run", run_or_compile):
        yield
