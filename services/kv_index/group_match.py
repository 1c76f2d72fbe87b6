"""The longest prefixes that workers can continue, over all groups of layers and workers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.kv_index.block_masks import BlockMasks
from shared.kv_layout import Reach, first_seen


def match_groups(
    holders: Sequence[BlockMasks],
    reaches: Sequence[Reach],
    block_hashes: Sequence[bytes],
    block_size: int,
    workers: int,
) -> Iterator[tuple[int, int]]:
    """Yields (number of blocks, bit mask of the workers whose longest prefix it is).

    `holders` [G] map a block's hash to the mask of the workers that hold it. A worker can continue
    a prefix if it holds, of each group, the blocks that the token after the prefix sees.
    """
    num_blocks = len(block_hashes)
    lacking = [0] * (num_blocks + 1)  # workers that cannot continue a prefix, by its length
    for of_group, reach in zip(holders, reaches, strict=True):
        absent = [workers & ~of_group.get(each) for each in block_hashes]
        firsts = [first_seen(reach, n * block_size) // block_size for n in range(num_blocks + 1)]
        for length, mask in enumerate(_unions(absent, firsts)):
            lacking[length] |= mask
    for length in range(num_blocks, 0, -1):
        found = workers & ~lacking[length]
        if found:
            yield length, found
            workers &= ~found


def _unions(masks: list[int], firsts: list[int]) -> Iterator[int]:
    """Returns the union of masks[firsts[n] : n] for each n; `firsts` never decrease.
    In linear time.

    A queue as two stacks: `older` holds the unions from each of its masks to its end.
    """
    older: list[int] = []
    newer, begin = 0, 0  # the union of the masks after `older`; the first mask of the queue
    for end, first in enumerate(firsts):
        if end:
            newer |= masks[end - 1]
        while begin < first:
            if not older:
                union = 0
                for mask in reversed(masks[begin:end]):
                    union |= mask
                    older.append(union)
                newer = 0
            older.pop()
            begin += 1
        yield newer | (older[-1] if older else 0)
