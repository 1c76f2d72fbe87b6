"""The Triton kernels of `tests/kernels/gpu`, run by Triton's interpreter on the CPU.

A variable selects the interpreter when Triton is imported, so the tests run in child processes.
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

ROOT = Path(__file__).parents[2]
GPU_TESTS = Path(__file__).parent / "gpu"
PARTS = sorted(
    path.name
    for path in GPU_TESTS.iterdir()
    if path.name.startswith("test_") or any(path.glob("test_*.py"))
)
HALVES = (PARTS[::2], PARTS[1::2])  # a process each: imports take 5 s


@pytest.mark.parametrize("parts", HALVES, ids=" ".join)
def test_kernels_agree_with_their_references(parts: list[str]) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
    folders = [str(GPU_TESTS / part) for part in parts]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *folders]
    completed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-8000:] + completed.stderr[-2000:]
    assert " passed" in completed.stdout
