"""The longest cached prefix from which a sequence can be resumed, over all groups of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shared.kv_layout import Reach, first_seen


class CachedPrefix(msgspec.Struct, frozen=True):
    """Blocks of each group (G), from the first that the token after the prefix still sees."""

    num_blocks: int
    first_blocks: tuple[int, ...]  # [G] index in the sequence of the group's first block
    block_ids: tuple[list[int], ...]  # [G], each of num_blocks - first_blocks[g]


def match_prefix(
    known: Sequence[Mapping[bytes, int]],
    reaches: Sequence[Reach],
    block_hashes: Sequence[bytes],
    block_size: int,
) -> CachedPrefix:
    """Returns the longest cached prefix. Each group has block ids by hash in `known` and a reach in
    `reaches`.

    A prefix of n blocks needs, of each group, those that the token at n · block_size sees.
    """
    if len(known) == 1 and reaches[0] is None:
        block_ids = _leading(known[0], block_hashes)
        return CachedPrefix(len(block_ids), (0,), (block_ids,))
    num_blocks = len(block_hashes)
    for ids_of, reach in zip(known, reaches, strict=True):
        if reach is None:
            num_blocks = len(_leading(ids_of, block_hashes[:num_blocks]))
    bounded = [pair for pair in zip(known, reaches, strict=True) if pair[1] is not None]
    while True:
        missing = [
            _last_missing(ids_of, reach, block_hashes, num_blocks, block_size)
            for ids_of, reach in bounded
        ]
        # every longer prefix that contains the missing block, needs it as well
        shorter = min((each for each in missing if each is not None), default=num_blocks)
        if shorter == num_blocks:
            break
        num_blocks = shorter
    firsts = tuple(first_seen(reach, num_blocks * block_size) // block_size for reach in reaches)
    return CachedPrefix(
        num_blocks,
        firsts,
        tuple(
            [ids_of[each] for each in block_hashes[first:num_blocks]]
            for ids_of, first in zip(known, firsts, strict=True)
        ),
    )


def _leading(ids_of: Mapping[bytes, int], block_hashes: Sequence[bytes]) -> list[int]:
    block_ids = []
    for block_hash in block_hashes:
        block_id = ids_of.get(block_hash)
        if block_id is None:
            break
        block_ids.append(block_id)
    return block_ids


def _last_missing(
    ids_of: Mapping[bytes, int],
    reach: Reach,
    block_hashes: Sequence[bytes],
    num_blocks: int,
    block_size: int,
) -> int | None:
    """Returns the index of the last missing block that a prefix of `num_blocks` needs;
    None: all are there.
    """
    first = first_seen(reach, num_blocks * block_size) // block_size
    for index in range(num_blocks - 1, first - 1, -1):
        if block_hashes[index] not in ids_of:
            return index
    return None
