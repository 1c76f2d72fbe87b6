"""Compiles a part's kernels with several threads: launches of the fake driver that run nothing.

For Triton's real CUDA backend (`fake_driver("cubin")`): what a device will load is then in Triton's
cache. Used where kernels are packed, and on a device whose keys differ from the packed ones.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from os import cpu_count
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from benchmarks.gpu_kit.compiled.carried_cache import listening
from tests.support.kernels.c_modules import build_launcher, build_utilities
from tests.support.kernels.fake_driver import FakeDriver

MAX_THREADS = 12


@contextmanager
def compiling_ahead(fake: FakeDriver, num_threads: int | None = None) -> Iterator[None]:
    """Inside, a launch is counted and its kernel compiled by another thread, at once or later; at
    the end all are compiled. Raises CannotCompile if some cannot be.

    `num_threads` None: one for each CPU, at most 12.
    """
    threads = num_threads or min(MAX_THREADS, cpu_count() or 1)

    def finish(*, src: Any, metadata: dict[str, Any], **_: Any) -> None:
        _check_memory(fake, metadata)
        build_launcher(src, SimpleNamespace(**metadata))

    with (
        ThreadPoolExecutor(threads, "compile") as pool,
        listening(finish),
        AsyncCompileMode(pool, ignore_errors=True) as mode,
        patch.object(JITFunction, "run", _compile_only(fake, mode)),
        patch.object(ast, "parse", _one_at_a_time(ast.parse)),
    ):
        utilities = pool.submit(build_utilities)
        yield
        failures = _failures([utilities, *mode.raw_futures])
    if failures:
        raise CannotCompile("; ".join(failures))


class CannotCompile(RuntimeError):
    """Some kernels cannot be compiled, or need more than a device has. Others are compiled."""


def _compile_only(fake: FakeDriver, mode: AsyncCompileMode) -> Any:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        fake.launches[self.__name__, 0] += 1
        token = active_mode.set(mode)  # threads of the part have a context of their own
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        finally:
            active_mode.reset(token)
        if _is_compiled(kernel):
            kernel.result()  # makes Triton find it by its key next time
        return kernel

    return compile_only


def _one_at_a_time(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Serialises `parse`. Before Python 3.12 all threads share one count of its recursion depth,
    and calls on other threads make it raise SystemError.
    """
    lock = Lock()

    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    return parse_alone


def _is_compiled(kernel: Any) -> bool:
    future = vars(kernel).get("future")
    return future is not None and future.done() and future.exception() is None


def _check_memory(fake: FakeDriver, metadata: dict[str, Any]) -> None:
    """Raises RuntimeError, as a launch would."""
    needed, limit = metadata["shared"], fake.max_shared_bytes
    if needed > limit:
        raise RuntimeError(f"{metadata['name']} needs {needed} bytes of {limit} shared memory")


def _failures(futures: list[Future[Any]]) -> list[str]:
    wait(futures)
    errors = [each.exception() for each in futures]
    return sorted({_first_line(error) for error in errors if error is not None})


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
