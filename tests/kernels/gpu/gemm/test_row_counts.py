"""The numbers of rows that need other kernels are computed, not searched."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.gemm import linear_tile
from kernels.gpu.gemm.linear_tile import row_counts
from kernels.sum_lanes import SumLanes

COLUMNS = (8, 32, 100, 512, 4096, 6144, 25_400, 28_672, 128_256)
WIDTHS = (32, 64, 128, 300, 4096, 14_336)
MOST_TILINGS = 500  # of 8,192 rows and 4 weights each


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_counts_are_those_of_a_search(
    seed: int, stored: torch.dtype, is_batch_invariant: bool
) -> None:
    rng = random.Random(seed)
    shapes: list[tuple[int, int, SumLanes | None]] = [
        (rng.choice(COLUMNS), rng.choice(WIDTHS), None) for _ in range(2)
    ]
    shapes += [(rows, k, SumLanes.of([k * i // 8 for i in range(9)])) for rows, k, _ in shapes]
    max_rows = rng.choice((1, 16, 300, 600))
    found = row_counts(shapes, stored, max_rows, is_batch_invariant=is_batch_invariant)
    with patch.object(linear_tile, "_breakpoints", lambda _, most: range(1, most + 1)):
        searched = row_counts(shapes, stored, max_rows, is_batch_invariant=is_batch_invariant)
    assert found == searched


def test_number_of_tilings_does_not_grow_with_the_rows() -> None:
    shapes = [(n, k, None) for n, k in ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))]
    with patch.object(linear_tile, "tiling", wraps=linear_tile.tiling) as tiling:
        row_counts(shapes, torch.bfloat16, 8192, is_batch_invariant=True)
    assert tiling.call_count < MOST_TILINGS
