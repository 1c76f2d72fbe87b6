"""Code that is generated once an operation: its results, and what the cache holds of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.warm import Mode, in_modes

SOURCE = """
import sys
import numba, numpy as np
from numba import prange
from kernels.cpu.compile import compiled
from kernels.cpu.deferred_codegen import defer_codegen

numba.config.CACHE_DIR = sys.argv[1]

@compiled()
def squared(x):
    return x * x

@compiled()
def squared_sum(values):
    total = 0.0
    for each in values:
        total += squared(each)
    return total

@compiled(parallel=True)
def row_sums(values, sums):
    for row in prange(len(values)):
        sums[row] = squared_sum(values[row])

if sys.argv[2] == "deferred":
    defer_codegen()
sums = np.zeros(2)
row_sums(np.arange(6.0).reshape(2, 3), sums)
print(*sums, sum(row_sums.stats.cache_hits.values()))
if sys.argv[2] == "immediate":
    print(squared_sum(np.arange(3.0)))
"""


def test_operation_is_loaded_with_its_callees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    module, cache = tmp_path / "sums.py", tmp_path / "cache"
    module.write_text(SOURCE)

    def outputs(mode: str) -> list[str]:
        command = [sys.executable, str(module), str(cache), mode]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert outputs("deferred") == ["5.0", "50.0", "0"]
    assert [each.name.split("-")[0] for each in cache.rglob("*.nbi")] == ["sums.row_sums"]
    # Callees have no code of their own in the cache: one that Python calls is compiled again.
    assert outputs("immediate") == ["5.0", "50.0", "1", "5.0"]


@pytest.mark.parametrize(
    ("statuses", "modes"),
    [
        ([0], ["deferred"]),
        ([-signal.SIGSEGV, 0], ["deferred", "immediate"]),
        ([1, 1], ["deferred", "immediate"]),
        ([-signal.SIGTERM], ["deferred"]),
    ],
)
def test_failed_child_is_run_once_more_without_deferral(
    statuses: list[int], modes: list[Mode]
) -> None:
    run: list[Mode] = []

    def child(mode: Mode) -> tuple[int, str]:
        run.append(mode)
        return statuses[len(run) - 1], mode

    assert in_modes(child) == (statuses[-1], modes[-1])
    assert run == modes
