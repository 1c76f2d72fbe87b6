"""A findable block, and the grouping of consecutive blocks into events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.messages import BlocksStored
from shared.packing import pack_hashes


class CachedBlock(msgspec.Struct, frozen=True):
    """The record of a hashed block."""

    tenant_id: str
    parent_hash: bytes
    block_index: int
    block_hash: bytes
    group: int = 0
    region_class: str = ""  # that of the tenant; none of a public block


def runs_of(blocks: Iterable[CachedBlock]) -> list[BlocksStored]:
    """Returns one event for each run of blocks in which every block is the child of
    the previous one.
    """
    runs: list[list[CachedBlock]] = []
    for block in blocks:
        if runs and _continues(runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return [
        BlocksStored(
            tenant_id=run[0].tenant_id,
            parent_hash=run[0].parent_hash,
            first_block_index=run[0].block_index,
            block_hashes=pack_hashes([block.block_hash for block in run]),
            group=run[0].group,
        )
        for run in runs
    ]


def _continues(last: CachedBlock, block: CachedBlock) -> bool:
    return last.block_hash == block.parent_hash and last.group == block.group
