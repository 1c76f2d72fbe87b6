"""Only `load` compiles the loops; schedulers on one host share numba's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from services.scheduler import cost_kernel

# Decides on random fleets in Python, then in machine code; the results are exactly equal.
# flock also conflicts with a lock of the same process, if the file is opened again.
EQUAL = """
import fcntl
import sys
from pathlib import Path
import numpy as np
from services.scheduler import cost_kernel
from services.scheduler.cost_kernel import *

assert "numba" not in sys.modules

def side(rng, size):
    floats = rng.uniform(0, 2, (NUM_FLOATS, size + 2))
    floats[[BUSY_UNTIL, CLOSED_UNTIL]] *= rng.integers(0, 2, (2, size + 2))
    floats[[FREE_TOKENS, TOTAL_TOKENS, CONTEXT_TOKENS]] *= 100
    codes = rng.integers(0, 3, (3, size + 2)).astype(np.uint64)
    codes[NAME] = np.arange(size + 2)
    holders = rng.permutation(size)[: rng.integers(0, size + 1)].astype(np.int64)
    allowed = rng.integers(0, 4, size) > 0 if rng.integers(2) else np.zeros(0, np.bool_)
    held = rng.integers(0, 40, len(holders)).astype(np.float64)
    return RoleWorkers(WorkerColumns(floats, codes, size), holders, held, allowed)

def decide():
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        decodes, prefills = side(rng, 1 + seed % 9), side(rng, seed % 7)
        terms = RequestTerms(50.0, 60.0, 70.0, 10.0, 40.0, 0.01, 0.5)
        excluded = np.arange(seed % 2)
        found += costs_of_decodes(decodes, prefills, terms, excluded)
        found += nearest_prefills(prefills, terms, np.uint64(1), 20.0, 0, 3)
    return found

def is_locked(folder):
    with Path(folder, "scan.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

plain = decide()
from numba.core.caching import IndexDataCacheFile
found = []
load = IndexDataCacheFile.load
def load_watched(self, key):
    found.append(is_locked(self._cache_path))
    return load(self, key)

IndexDataCacheFile.load = load_watched
cost_kernel.load()
assert cost_kernel.is_cached()
print(len(found) > 1, all(found))
compiled = decide()
print(len(plain), all(np.array_equal(a, b) for a, b in zip(plain, compiled, strict=True)))
"""


def test_loops_are_loaded_under_a_file_lock_and_decide_equally() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EQUAL], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == ["True True", "360 True"]


# Loads the loops of a copy of the package, then rewrites its source: unchanged, and changed.
REWRITTEN = """
import os
from pathlib import Path
from services.scheduler import cost_kernel

source = Path(cost_kernel.__file__)
cost_kernel.load()
compiled_at = source.stat().st_mtime
os.utime(source, (compiled_at + 60, compiled_at + 60))
print(cost_kernel.is_cached())
source.write_bytes(source.read_bytes() + b"# changed\\n")
os.utime(source, (compiled_at - 60, compiled_at - 60))
print(cost_kernel.is_cached())
"""


def test_cache_is_valid_for_the_same_source_whatever_the_time_of_its_file(tmp_path: Path) -> None:
    """A checkout writes files again; a release may set all files to one old time."""
    package, copy = Path(cost_kernel.__file__).parent, tmp_path / "services" / "scheduler"
    copy.mkdir(parents=True)
    (tmp_path / "services" / "__init__.py").touch()
    (copy / "__init__.py").touch()
    shutil.copy2(package / "cost_kernel.py", copy)
    if (package / "__pycache__").exists():  # saves compiling
        shutil.copytree(package / "__pycache__", copy / "__pycache__")
    done = subprocess.run(
        [sys.executable, "-c", REWRITTEN],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.split() == ["True", "False"]


ROOT = Path(__file__).resolve().parents[3]

USE = """
import asyncio
from services.scheduler.compiled_loops import use_compiled_loops
asyncio.run(use_compiled_loops())
print("goes on")
"""


def test_scheduler_goes_on_where_numba_fails(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise RuntimeError('no such CPU')")
    done = subprocess.run(
        [sys.executable, "-c", USE],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.stdout.splitlines()[-1:] == ["goes on"]
    assert "cost_kernel_not_compiled" in done.stdout
