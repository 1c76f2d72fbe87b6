"""Kernels for CPUs: loops that numba compiles, and oneDNN's matrix products.

They do what `kernels.reference` does, with hardly any launches and intermediate tensors. Every
operation is spelled out (fused multiply-adds where they are meant, sums in a fixed order), so that
a row's bits depend on its own inputs only: not on batch, chunk or number of threads.

Their threads are TBB's where it is installed: one that has nothing to do yields its core to the
other processes of the host, and a task that no second thread has begun is done by the first. Under
OpenMP a step waits for a thread that sleeps, or that has lost its core.

Machine code is kept in a cache directory that bears a digest of these sources: numba's own check
sees a change of a function's file, not of the files that it calls into.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from hashlib import blake2b
from pathlib import Path

import numba

from kernels.cache import cache_root


def _cache_dir() -> Path:
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return cache_root() / "kernels" / digest.hexdigest()


def _load_tbb() -> None:
    """numba asks the dynamic linker, which does not look where pip installs libraries."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(sys.prefix, "lib", "libtbb.so.12")), mode=ctypes.RTLD_GLOBAL)


_load_tbb()
if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_dir())
