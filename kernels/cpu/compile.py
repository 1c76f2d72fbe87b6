"""Kernels for CPUs: loops that numba compiles, and oneDNN's matrix products.

They compute what `kernels.reference` computes, with few launches and few intermediate tensors.
Every operation is explicit (fused multiply-adds where intended, sums in a fixed order), so that a
row's bits depend only on its own inputs: not on batch, chunk or number of threads.

Their threads are TBB's where it is installed: an idle thread yields its core to the other
processes of the host, and the first thread runs a task that no second thread has begun. Under
OpenMP a step waits for a thread that sleeps or has lost its core.

The name of the machine code's cache directory contains a digest of these sources: numba's own check
detects a change of a function's file, but not of the files of its callees. In that directory, code
has the place of its function: another clone finds it, and a new image with the cache of an old one.

numba's cache supports one writer. If two processes fill it at the same time, each with code for
another dtype, one index entry can name the other process's code (IndexDataCacheFile.save in
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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from kernels.cache import cache_root

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = Path(__file__).parent


def _digest_of_sources() -> str:
    digest = blake2b(digest_size=8)
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES_DIGEST = _digest_of_sources()


def _load_tbb() -> None:
    """Loads TBB for numba: numba uses the dynamic linker, which does not search pip's libraries."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(sys.prefix, "lib", "libtbb.so.12")), mode=ctypes.RTLD_GLOBAL)


_load_tbb()
if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(cache_root() / "kernels" / SOURCES_DIGEST)


# Only explicit prange loops are parallel: searching for others only takes time.
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
    """A decorator that compiles the function to machine code, cached in the cache directory.

    `is_inlined`: inlines it into the compiled functions that call it. Each call counts a reference
    to every array argument, which costs more than the work of some functions.
    Divisions by zero give infinities: checking each of them would prevent vectorisation.
    """

    def decorate(function: Any) -> Any:
        inline = "always" if is_inlined else "never"
        threads = _ONLY_PRANGE if parallel else False
        options = {"parallel": threads, "inline": inline, "error_model": "numpy"}
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = _SharedCache(function)  # like cache=True, but with this module's cache
        return dispatcher

    return decorate


class _PlaceInSources(_CacheLocator):
    """Where numba stores the code of a function of this folder, and what makes it valid.

    numba's own locators depend on the path of the sources, the markers of compiled plans do not:
    each process of another clone would compile by itself what a marker calls compiled.
    """

    def __init__(self, place: Path, line: int) -> None:
        self._place, self._line = place, line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _PlaceInSources | None:
        folder = Path(py_file).parent
        if not folder.is_relative_to(_SOURCES):
            return None
        locator = cls(folder.relative_to(_SOURCES), py_func.__code__.co_firstlineno)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def get_cache_path(self) -> str:
        return str(Path(cache_dir(), "code", self._place))

    def get_source_stamp(self) -> str:
        return SOURCES_DIGEST

    def get_disambiguator(self) -> str:
        return str(self._line)


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_PlaceInSources, *CompileResultCacheImpl._locator_classes)


class _SharedCache(FunctionCache):
    _impl_class = _CacheImpl

    def save_overload(self, sig: Any, data: Any) -> None:
        if not getattr(data.library, "has_code", True):  # see deferred_codegen.py
            return
        with locked(Path(self.cache_path, "writing.lock")):
            super().save_overload(sig, data)


@contextmanager
def compile_lock() -> Iterator[None]:
    """Makes one of several processes that start together compile; the others load its code."""
    with locked(Path(cache_dir(), "compiling.lock")):
        yield


def start_child(module: str, *arguments: str, niceness: int = 0) -> subprocess.Popen[str]:
    """Runs a module of this package in a child process, with one thread and this cache."""
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
    """The directory of machine code. It can change while a process runs."""
    return str(numba.config.CACHE_DIR)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file lock, which the OS kernel releases when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
