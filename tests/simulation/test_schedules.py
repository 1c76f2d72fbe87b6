"""60 schedules, different for each commit: the fleet's invariants hold under all faults.

A failure prints its seed and the command that replays it. `scripts/test --long` runs 10,000.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.simulation.sweep import report_of, run_seeds

NUM_SCHEDULES = 60
PIECE = 10  # schedules per case: about one second
FIRST_SEEDS = 1_000_000  # number of different first seeds of commits


def first_seed() -> int:
    """Derived from the hash of the checked-out commit; 0 outside a repository."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found[:12], 16) % FIRST_SEEDS


def pieces_from(first: int) -> list[range]:
    starts = range(first, first + NUM_SCHEDULES, PIECE)
    return [range(start, start + PIECE) for start in starts]


@pytest.mark.parametrize(
    "seeds", pieces_from(first_seed()), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}"
)
def test_invariants_hold_in_every_schedule(seeds: range) -> None:
    failed = run_seeds(seeds).failed
    assert not failed, "\n" + "\n".join(report_of(outcome) for outcome in failed)
