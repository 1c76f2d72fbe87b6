"""Kernels for CPUs: loops that numba compiles, and oneDNN's matrix products.

They do what `kernels.reference` does, with hardly any launches and intermediate tensors. Every
operation is spelled out (fused multiply-adds where they are meant, sums in a fixed order), so that
a row's bits depend on its own inputs only: not on batch, chunk or number of threads.

Their threads are TBB's where it is installed: one that has nothing to do yields its core to the
other processes of the host, and a task that no second thread has begun is done by the first. Under
OpenMP a step waits for a thread that sleeps, or that has lost its core.

Machine code is kept in a cache directory that bears a digest of these sources: numba's own check
sees a change of a function's file, not of the files that it calls into.

numba's cache is made for one writer. Of two processes that fill it at the same time, each with
code for another dtype, one would name the other's code in the index (IndexDataCacheFile.save in
numba/core/caching.py reads, names and writes without a lock), and every later process would run it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache

from kernels.cache import cache_root

_ROOT = Path(__file__).resolve().parents[2]


def _digest_of_sources() -> str:
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES_DIGEST = _digest_of_sources()


def _load_tbb() -> None:
    """numba asks the dynamic linker, which does not look where pip installs libraries."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(sys.prefix, "lib", "libtbb.so.12")), mode=ctypes.RTLD_GLOBAL)


_load_tbb()
if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(cache_root() / "kernels" / SOURCES_DIGEST)


# Loops are parallel where they say so: to search for others only takes time.
_ONLY_PRANGE = {
    "prange": True,
    "comprehension": False,
    "fusion": False,
    "numpy": False,
    "reduction": False,
    "setitem": False,
    "stencil": False,
}


def compiled(*, parallel: bool = False, is_inlined: bool = False) -> Callable[[Any], Any]:
    """A decorator: the function as machine code, which is kept in the cache directory.

    `is_inlined`: into the compiled functions that call it. Each call counts a reference to every
    array that it is given, which costs more than what some functions do with them.
    Divisions by zero give infinities: a check of each would keep loops from being vectorised.
    """

    def decorate(function: Any) -> Any:
        inline = "always" if is_inlined else "never"
        threads = _ONLY_PRANGE if parallel else False
        options = {"parallel": threads, "inline": inline, "error_model": "numpy"}
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = _SharedCache(function)  # what cache=True does, with a cache of ours
        return dispatcher

    return decorate


class _SharedCache(FunctionCache):
    def save_overload(self, sig: Any, data: Any) -> None:
        with locked(Path(self.cache_path, "writing.lock")):
            super().save_overload(sig, data)


@contextmanager
def compile_lock() -> Iterator[None]:
    """Of several processes that start at once, one compiles and the others load its code."""
    with locked(Path(cache_dir(), "compiling.lock")):
        yield


def start_child(module: str, *arguments: str, niceness: int = 0) -> subprocess.Popen[str]:
    """Runs a module of this package in a process of its own, with one thread and this cache."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["nice", "-n", str(niceness), sys.executable, "-m", module, *arguments],
        env={**os.environ, **one_thread, "PYTHONPATH": path, "NUMBA_CACHE_DIR": cache_dir()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def cache_dir() -> str:
    """Of machine code. It may be changed while a process runs."""
    return str(numba.config.CACHE_DIR)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The kernel frees the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
