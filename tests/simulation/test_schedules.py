"""60 schedules, the same for each commit: the fleet's invariants hold under all faults.

A failure prints its seed and the command that replays it. `scripts/test --long` runs 10,000.
"""

from __future__ import annotations

import pytest

from tests.simulation.sweep import report_of, run_seeds

NUM_SCHEDULES = 60
PIECE = 10  # schedules per case: about one second
PIECES = [range(first, first + PIECE) for first in range(0, NUM_SCHEDULES, PIECE)]


@pytest.mark.parametrize("seeds", PIECES, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_invariants_hold_in_every_schedule(seeds: range) -> None:
    failed = run_seeds(seeds).failed
    assert not failed, "\n" + "\n".join(report_of(outcome) for outcome in failed)
