"""Lanes: borders, the parts of ranks, and sums that do not depend on the number of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shared.engine.parallel.lanes import (
    EMPTY_LANE,
    NUM_LANES,
    lane_borders,
    rank_lanes,
    tree_sum,
)


@pytest.mark.parametrize(
    ("num_units", "borders"),
    [
        (90, (0, 11, 22, 33, 45, 56, 67, 78, 90)),
        (28, (0, 3, 7, 10, 14, 17, 21, 24, 28)),
        (8, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (5, (0, 0, 1, 1, 2, 2, 3, 4, 5)),
        (1, (0, 0, 0, 0, 0, 0, 0, 0, 1)),
    ],
)
def test_borders_halve_recursively(num_units, borders):
    assert lane_borders(num_units) == borders


def test_ranks_differ_by_at_most_one_unit():
    for num_units in range(1, 300):
        borders = lane_borders(num_units)
        assert len(borders) == NUM_LANES + 1
        for step in (4, 2, 1):
            sizes = [high - low for low, high in pairwise(borders[::step])]
            assert sum(sizes) == num_units
            assert max(sizes) - min(sizes) <= 1


def test_ranks_hold_aligned_lanes():
    assert [rank_lanes(rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert rank_lanes(0, 1) == (0, 8)
    with pytest.raises(ValueError, match="3 ranks"):
        rank_lanes(0, 3)
    with pytest.raises(ValueError, match="rank 2"):
        rank_lanes(2, 2)


def test_tree_is_the_same_for_any_number_of_ranks():
    generator = torch.Generator().manual_seed(1)
    lanes = torch.randn(NUM_LANES, 7, 33, generator=generator)
    expected = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    expected = expected + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
    for num_ranks in (1, 2, 4, 8):
        spans = [slice(*rank_lanes(rank, num_ranks)) for rank in range(num_ranks)]
        assert torch.equal(tree_sum([tree_sum(lanes[span]) for span in spans]), expected)
    assert not torch.equal(lanes.sum(0), expected)  # another order has other bits


def test_empty_lane_changes_no_bit():
    numbers = torch.tensor([0.0, -0.0, 1.5, -1e-45, float("inf")])
    both = tree_sum([torch.full_like(numbers, EMPTY_LANE), numbers])
    assert torch.equal(both.view(torch.int32), numbers.view(torch.int32))


@pytest.mark.parametrize("count", [0, 3, 6])
def test_count_that_is_no_power_of_two_raises(count):
    with pytest.raises(ValueError, match=f"{count} lanes"):
        tree_sum([torch.zeros(1)] * count)


def test_no_units_raise():
    with pytest.raises(ValueError, match="0 units"):
        lane_borders(0)
