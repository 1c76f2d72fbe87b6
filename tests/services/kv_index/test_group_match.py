"""What the index promises of workers with several groups of layers, against brute force."""

from __future__ import annotations

import random

import pytest

from services.kv_index.block_masks import BlockMasks
from services.kv_index.group_match import match_groups
from services.kv_index.index import PrefixIndex
from shared.kv_layout import Chunk, Reach, Window
from shared.messages import BlockPage, BlocksRemoved, BlocksStored, KvEvents
from shared.packing import pack_hashes

BLOCK_SIZE = 4
HASHES = [bytes([number]) * 16 for number in range(24)]


def sees(reach: Reach, position: int, key: int) -> bool:
    """The definition of a reach."""
    match reach:
        case None:
            return True
        case Window(tokens=tokens):
            return position - tokens < key
        case Chunk(tokens=tokens):
            return key // tokens == position // tokens


def longest(held: list[set[bytes]], reaches: tuple[Reach, ...]) -> int:
    return max(
        count
        for count in range(len(HASHES) + 1)
        if all(
            HASHES[key // BLOCK_SIZE] in of_group
            for of_group, reach in zip(held, reaches, strict=True)
            for key in range(count * BLOCK_SIZE)
            if sees(reach, count * BLOCK_SIZE, key)
        )
    )


@pytest.mark.parametrize(
    "reaches",
    [
        (None, Window(9)),
        (None, Chunk(12)),
        (None, Chunk(10), Window(5)),
        (Window(1),),
        (Window(30), Window(6)),
    ],
)
def test_a_prefix_is_promised_where_every_group_can_continue(reaches: tuple[Reach, ...]) -> None:
    for seed in range(40):
        check_promises(reaches, seed)


def check_promises(reaches: tuple[Reach, ...], seed: int) -> None:
    rng = random.Random(seed)
    workers = [
        [
            {each for each in HASHES if rng.random() < 0.9 - 0.1 * group}
            if rng.random() < 0.7
            else set(HASHES[: rng.randrange(25)])
            for group in range(len(reaches))
        ]
        for _ in range(5)
    ]
    holders = [BlockMasks() for _ in reaches]
    for group, masks in enumerate(holders):
        for each in HASHES:
            mask = sum((each in held[group]) << slot for slot, held in enumerate(workers))
            masks.part_of(each)[each] = mask
    found = dict.fromkeys(range(5), 0)
    for length, mask in match_groups(holders, reaches, HASHES, BLOCK_SIZE, 0b11111):
        for slot in range(5):
            if mask >> slot & 1:
                assert not found[slot], "promised twice"
                found[slot] = length
    assert found == {slot: longest(held, reaches) for slot, held in enumerate(workers)}


def test_the_index_keeps_groups_apart() -> None:
    index = PrefixIndex()
    reaches: tuple[Reach, ...] = (None, Window(6))
    index.add_worker("w", "m", "r", "f", reaches=reaches, block_size=BLOCK_SIZE)
    index.begin_resync("w")
    source = {"worker_id": "w", "epoch": 1, "model": "m", "revision": "r", "kv_format": "f"}

    def stored(group: int, first: int, end: int) -> BlocksStored:
        return BlocksStored(
            tenant_id="t",
            parent_hash=bytes(16),
            first_block_index=first,
            block_hashes=pack_hashes(HASHES[first:end]),
            group=group,
        )

    def promised() -> list[int]:
        return [each.num_blocks for each in index.match(HASHES, "m", "r").matches]

    index.add_page(BlockPage(**source, sequence_number=0, stored=(stored(0, 0, 9),)))
    index.finish_resync("w")
    assert promised() == []
    index.apply(KvEvents(**source, sequence_number=1, events=(stored(1, 4, 7),)))
    assert promised() == [7]
    gone = BlocksRemoved(block_hashes=pack_hashes([HASHES[6]]), group=1)
    index.apply(KvEvents(**source, sequence_number=2, events=(gone,)))
    assert promised() == [6]
    gone = BlocksRemoved(block_hashes=pack_hashes([HASHES[5]]), group=0)
    index.apply(KvEvents(**source, sequence_number=3, events=(gone,)))
    assert promised() == []
