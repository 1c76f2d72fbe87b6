"""Cuts: the parts of all ranks are the whole, and fit each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shared.engine.parallel.cuts import (
    WHOLE,
    Cut,
    column_lanes,
    gate_up_cut,
    head_lanes,
    kv_head_range,
    qkv_cut,
    rank_range,
)


def part_of(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    found = tensor.new_full(cut.shape(tensor.shape), -1)
    for source, rows in cut.slices(tensor.shape):
        found[rows] = tensor[source]
    return found


def test_lanes_of_heads_and_columns():
    assert head_lanes(28, 128)[:4] == (0, 384, 896, 1280)
    assert head_lanes(4, 16) == (0, 0, 0, 0, 32, 32, 32, 32, 64)  # two heads fill a block of 32
    assert head_lanes(7, 16) == (0, 0, 16, 32, 48, 64, 80, 96, 112)  # 112 columns are no blocks
    assert column_lanes(2880) == tuple(32 * each for each in (0, 11, 22, 33, 45, 56, 67, 78, 90))
    assert column_lanes(40) == (0, 0, 0, 0, 32, 32, 32, 32, 40)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_parts_of_all_ranks_are_the_whole(num_ranks):
    weight = torch.arange(96 * 352).view(96, 352)
    ranks = range(num_ranks)
    lanes = column_lanes(352)
    columns = [Cut(columns=rank_range(lanes, rank, num_ranks)) for rank in ranks]
    assert torch.equal(torch.cat([part_of(weight, cut) for cut in columns], 1), weight)
    rows = [Cut(rows=(rank_range(column_lanes(96), rank, num_ranks),)) for rank in ranks]
    assert torch.equal(torch.cat([part_of(weight, cut) for cut in rows]), weight)
    assert torch.equal(part_of(weight, WHOLE), weight)


def test_fused_rows_are_those_of_each_projection():
    """8 heads and 2 KV heads of 2 columns; the second of four ranks has heads 2 and 3."""
    query, key, value = torch.arange(16), torch.arange(100, 104), torch.arange(200, 204)
    weight = torch.cat([query, key, value])[:, None]
    heads = (2, 4)
    kv_heads = kv_head_range(heads, 8, 2)
    assert kv_heads == (0, 1)
    found = part_of(weight, qkv_cut(heads, kv_heads, 8, 2, 2)).flatten().tolist()
    assert found == [4, 5, 6, 7, 100, 101, 200, 201]
    gate_up = part_of(torch.arange(20)[:, None], gate_up_cut((4, 7), 10)).flatten().tolist()
    assert gate_up == [4, 5, 6, 14, 15, 16]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (7, 1), (8, 2), (32, 8)])
def test_ranks_share_kv_heads_if_these_are_fewer(num_heads, num_kv_heads):
    for num_ranks in (1, 2, 4, 8):
        lanes = [each // 32 for each in head_lanes(num_heads, 32)]
        group = num_heads // num_kv_heads
        for rank in range(num_ranks):
            first, end = rank_range(lanes, rank, num_ranks)
            low, high = kv_head_range((first, end), num_heads, num_kv_heads)
            assert {head // group for head in range(first, end)} == set(range(low, high))


def test_unequal_groups_of_heads_raise():
    with pytest.raises(ValueError, match="heads 0 to 4 of 9"):
        kv_head_range((0, 4), 9, 3)


@pytest.mark.parametrize(
    "cut", [Cut(rows=((0, 5),)), Cut(columns=(2, 9)), Cut(rows=((3, 2),)), Cut(columns=(-1, 2))]
)
def test_cut_outside_of_the_tensor_raises(cut):
    with pytest.raises(ValueError, match="outside of dimension"):
        cut.shape((4, 8))
    with pytest.raises(ValueError, match="no dimension 1"):
        Cut(columns=(0, 1)).shape((4,))


def test_lanes_end_with_the_last_column():
    for width in (1, 31, 32, 33, 352, 2880, 14336):
        borders = column_lanes(width)
        assert borders[0] == 0
        assert borders[-1] == width
        assert all(low <= high for low, high in pairwise(borders))
