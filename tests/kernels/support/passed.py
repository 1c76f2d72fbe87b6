"""Records in the cache directory what has compiled, so that unchanged kernels are skipped.

A record is valid for one state of the sources that are read here and one release of Triton. With
HEARTH_COMPILE_AGAIN=1, or once `passed` in the cache directory is deleted, everything is compiled.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path

import triton

from kernels.cache import cache_root

ROOT = Path(__file__).parents[3]


@cache
def sources_digest() -> str:
    """Covers Triton's release, `kernels/` without the CPU's, and the tests that compile."""
    digest = blake2b(triton.__version__.encode(), digest_size=8)
    own = list((ROOT / "kernels").glob("*.py"))
    gpu = list((ROOT / "kernels" / "gpu").rglob("*.py"))
    names = "kernels/support/ahead_of_time.py", "support/kernels/split_weights.py"
    tests = [ROOT / "tests" / name for name in (*names, "kernels/test_compiles.py")]
    tests += sorted((ROOT / "tests" / "kernels" / "compiled").glob("*.[jp]*"))
    for path in sorted(own + gpu) + tests:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_recorded(case: str) -> bool:
    return not os.environ.get("HEARTH_COMPILE_AGAIN") and case in _file().read_text().split("\n")


def record(case: str) -> None:
    with _file().open("a") as file:
        file.write(f"{case}\n")


def _file() -> Path:
    path = cache_root() / "passed" / f"{sources_digest()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path
