"""Kernels for CPUs: loops that numba compiles, and oneDNN's matrix products.

They do what `kernels.reference` does, with hardly any launches and intermediate tensors. Every
operation is spelled out (fused multiply-adds where they are meant, sums in a fixed order), so that
a row's bits depend on its own inputs only: not on batch, chunk or number of threads.

Machine code is kept in a cache directory that bears a digest of these sources: numba's own check
sees a change of a function's file, not of the files that it calls into.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numba

from kernels.cache import cache_root


def _cache_dir() -> Path:
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return cache_root() / "kernels" / digest.hexdigest()


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_dir())
