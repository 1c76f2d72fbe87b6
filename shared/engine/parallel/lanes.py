"""Sum lanes: the fixed order in which a row-parallel GEMM sums over K.

The GEMM of `o_proj` or `down_proj` is cut along K into eight lanes, the same at every number of
ranks. A lane is summed in FP32, the lanes are added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)),
and the sum is rounded once. A rank of 1, 2, 4 or 8 holds a subtree of this tree, so the bits of a
result do not depend on the number of ranks.

Batch-invariant sums across ranks: Zhang et al., "Deterministic Inference across Tensor Parallel
Sizes That Eliminates Training-Inference Mismatch" (arXiv 2511.17826).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # plans are made without torch
    from torch import Tensor

NUM_LANES = 8
Exchange = Literal["fp32", "bf16"]  # the form in which ranks send nodes of the tree
# The sum of a lane without units. Adding it changes no bit of any number, -0.0 included.
EMPTY_LANE = -0.0


def lane_borders(num_units: int) -> tuple[int, ...]:
    """Returns the first unit of each lane, and the end: 9 borders by recursive halving.

    A unit is a part of K that no rank divides: a head, 32 columns or a quantization group. With
    fewer units than lanes some lanes are empty. Raises ValueError.
    """
    if num_units < 1:
        raise ValueError(f"{num_units} units cannot be cut into lanes: at least 1 is needed")
    borders = [0, num_units]
    while len(borders) <= NUM_LANES:
        middles = [(low + high) // 2 for low, high in pairwise(borders)]
        borders = [each for pair in zip(borders, middles, strict=False) for each in pair]
        borders.append(num_units)
    return tuple(borders)


def rank_lanes(rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the lanes [first, end) of one rank. Raises ValueError."""
    if num_ranks not in (1, 2, 4, 8):
        raise ValueError(f"{num_ranks} ranks cannot share {NUM_LANES} lanes: 1, 2, 4 or 8 can")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} is not in [0, {num_ranks})")
    width = NUM_LANES // num_ranks
    return rank * width, (rank + 1) * width


def tree_sum(lanes: Tensor | Sequence[Tensor]) -> Tensor:
    """FP32 sums of aligned lanes or subtrees, [2^k, ...] in order -> their sum [...].

    An empty lane is filled with `EMPTY_LANE`. Raises ValueError unless their number is a power of
    two.
    """
    level = list(lanes)
    if not level or len(level) & (len(level) - 1):
        raise ValueError(f"{len(level)} lanes do not form a tree: a power of two does")
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
