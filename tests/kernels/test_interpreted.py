"""The Triton kernels of `tests/kernels/gpu`, run by Triton's interpreter on the CPU.

A variable selects the interpreter when Triton is imported, so the tests run in child processes. A
run that has passed is skipped until one of its sources changes; the long run has no such skips, and
HEARTH_COMPILE_AGAIN=1 runs all (see `tests.kernels.support.passed_runs`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this is the interpreter", allow_module_level=True)

from kernels.cache import cache_root
from tests.kernels.support import loaded_sources
from tests.kernels.support.passed_runs import PassedRun

ROOT = Path(__file__).parents[2]
GPU_TESTS = Path(__file__).parent / "gpu"
PARTS = {
    path.name
    for path in GPU_TESTS.iterdir()
    if path.name.startswith("test_") or any(path.glob("test_*.py"))
}
# Two processes of 20 s each; imports take 5 s. The first has no source of the engine.
WITH_ENGINE = {"moe", "rows", "sampling", "test_engine.py", "test_start_check.py"}
RUNS = sorted(PARTS - WITH_ENGINE), sorted(WITH_ENGINE)


@pytest.mark.parametrize("parts", RUNS, ids=" ".join)
def test_kernels_agree_with_their_references(parts: list[str], tmp_path: Path) -> None:
    folders = [GPU_TESTS / part for part in parts]
    run = PassedRun(folders, cache_root() / "passed")
    if run.is_current():
        pytest.skip("passed before, with the same sources")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"TRITON_INTERPRET": "1", loaded_sources.FILE: str(tmp_path / "loaded")}
    options = "-p", loaded_sources.__name__, "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options, *map(str, folders)]
    completed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-8000:] + completed.stderr[-2000:]
    assert " passed" in completed.stdout
    sources = (tmp_path / "loaded").read_text().split("\n")
    assert "kernels/device.py" in sources
    run.record(sources)
