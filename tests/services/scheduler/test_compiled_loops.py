from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
import asyncio
from services.scheduler.compiled_loops import use_compiled_loops
asyncio.run(use_compiled_loops())
print("goes on")
"""


def test_scheduler_goes_on_where_numba_fails(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise RuntimeError('no such CPU')")
    done = subprocess.run(
        [sys.executable, "-c", SOURCE],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.stdout.splitlines()[-1:] == ["goes on"]
    assert "cost_kernel_not_compiled" in done.stdout
