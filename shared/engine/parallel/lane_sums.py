"""Sums of lanes in the order of `lanes.tree_sum`, cut where ranks exchange them. Pure.

With exchange in FP32 every node of the tree is FP32. With exchange in BF16 every node below the
root, which are those that some number of ranks sends, is rounded to BF16 at every number of ranks,
also at one: half the bytes, bits of its own, and those still the same at 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.parallel.lanes import NUM_LANES, Exchange, tree_sum


def check_lanes(lanes: Tensor, tp: int, exchange: Exchange) -> None:
    """Raises ValueError unless these are the FP32 partial sums of one rank's lanes."""
    if lanes.dtype != torch.float32 or lanes.dim() < 1:
        raise ValueError(f"partial sums are {lanes.dtype}, {lanes.dim()}-d: FP32 [lanes, ...]")
    expected, given = NUM_LANES // tp, lanes.shape[0]
    is_subtree = given > 0 and expected % given == 0
    if given != expected and (exchange == "bf16" or not is_subtree):
        raise ValueError(f"{given} partial sums: a rank of {tp} has {expected} lanes")


def sum_nodes(nodes: Sequence[Tensor], exchange: Exchange, *, is_root: bool) -> Tensor:
    """Returns the sum of aligned nodes, lowest lane first. FP32 if it is the root,
    else as it is sent.
    """
    if exchange == "fp32":
        return tree_sum(nodes)
    level = [node.to(torch.bfloat16) for node in nodes]
    while len(level) > 1:
        is_last = len(level) == 2 and is_root
        pairs = zip(level[::2], level[1::2], strict=True)
        sums = [left.float() + right.float() for left, right in pairs]
        level = sums if is_last else [each.to(torch.bfloat16) for each in sums]
    return level[0]


def halved_range(tp_rank: int, tp: int, num_elements: int) -> tuple[int, int]:
    """Returns the elements [begin, end) whose sum a rank holds after recursive halving.

    At level i the ranks r and r xor 2^i exchange halves: the lower one retains the first half.
    """
    begin, end = 0, num_elements
    for level in range(tp.bit_length() - 1):
        middle = begin + (end - begin + 1) // 2
        begin, end = (begin, middle) if tp_rank & (1 << level) == 0 else (middle, end)
    return begin, end
