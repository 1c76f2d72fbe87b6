"""The second half of the schedules that every change must pass; the other file has the rest."""

from __future__ import annotations

import pytest

from tests.simulation.schedule_ranges import check, pieces_of


@pytest.mark.parametrize("seeds", pieces_of(1), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_happens_to_the_fleet(seeds: range) -> None:
    check(seeds)
