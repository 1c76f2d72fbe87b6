"""How the loops are compiled: without the GIL, and once for all processes of a host.

numba's cache is made for one writer. Of two processes that fill it at the same time, each with
code for another dtype, one would name the other's code in the index (IndexDataCacheFile.save in
numba/core/caching.py reads, names and writes without a lock), and every later process would run it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache


def compiled(*, parallel: bool = False, is_inlined: bool = False) -> Callable[[Any], Any]:
    """A decorator: the function as machine code, which is kept in the cache directory.

    `is_inlined`: into the compiled functions that call it. Each call counts a reference to every
    array that it is given, which costs more than what some functions do with them.
    Divisions by zero give infinities: a check of each would keep loops from being vectorised.
    """

    def decorate(function: Any) -> Any:
        inline = "always" if is_inlined else "never"
        options = {"parallel": parallel, "inline": inline, "error_model": "numpy"}
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = _SharedCache(function)  # what cache=True does, with a cache of ours
        return dispatcher

    return decorate


class _SharedCache(FunctionCache):
    def save_overload(self, sig: Any, data: Any) -> None:
        with _locked(Path(self.cache_path, "writing.lock")):
            super().save_overload(sig, data)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Of several processes that start at once, one compiles and the others load its code."""
    with _locked(Path(numba.config.CACHE_DIR, "compiling.lock")):
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel frees the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
