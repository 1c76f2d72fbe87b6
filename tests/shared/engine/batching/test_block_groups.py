"""The block pool with several groups of layers: random operations against brute force."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from shared.engine.batching.block_needs import BlockNeeds
from shared.engine.batching.block_pool import BlockPool
from shared.errors import ConfigError
from shared.kv_layout import Chunk, Reach, Window
from shared.messages import BlocksRemoved, BlocksStored
from shared.packing import unpack_hashes

BLOCK_SIZE = 4
REACHES: dict[str, tuple[Reach, ...]] = {
    "full": (None,),
    "window alone": (Window(9),),
    "full and window": (None, Window(6)),
    "full and chunk": (Chunk(12), None),
    "four": (Window(5), None, Chunk(8), Window(13)),
    "bounded alone": (Window(5), Chunk(10)),
}
Known = set[tuple[int, bytes]]


def chain(path: str) -> list[bytes]:
    return [blake2b(path[: end + 1].encode(), digest_size=16).digest() for end in range(len(path))]


def sees(reach: Reach, position: int, key: int) -> bool:
    """The definition of a reach."""
    match reach:
        case None:
            return key < position
        case Window(tokens=tokens):
            return position - tokens < key < position
        case Chunk(tokens=tokens):
            return key // tokens == position // tokens and key < position


def is_resumable(known: Known, reaches: tuple[Reach, ...], hashes: list[bytes], count: int) -> bool:
    position = count * BLOCK_SIZE
    return all(
        (group, hashes[key // BLOCK_SIZE]) in known
        for group, reach in enumerate(reaches)
        for key in range(position)
        if sees(reach, position, key)
    )


def apply_events(pool: BlockPool, known: Known) -> None:
    for event in pool.take_events():
        match event:
            case BlocksStored():
                new = {(event.group, each) for each in unpack_hashes(event.block_hashes)}
                assert not new & known, "stored twice"
                known |= new
            case BlocksRemoved():
                gone = {(event.group, each) for each in unpack_hashes(event.block_hashes)}
                assert gone <= known
                known -= gone


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REACHES)
def test_match_is_the_longest_resumable_prefix(name: str, seed: int) -> None:
    reaches, rng = REACHES[name], random.Random(seed)
    pool, known = BlockPool(40, BLOCK_SIZE, reaches=reaches), set[tuple[int, bytes]]()
    held: list[list[int]] = []
    num_hits = 0
    for _ in range(600):
        path = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
        hashes = chain(path)
        match rng.randrange(4):
            case 0 if held:
                pool.release(held.pop(rng.randrange(len(held))))
            case 1:
                pool.pin(hashes)
                pool.unpin(hashes)
            case _:
                group, first = rng.randrange(len(reaches)), rng.randrange(len(path))
                first = rng.choice([0, first])
                block_hashes = hashes[first:]
                if len(block_hashes) > pool.num_free_blocks:
                    continue
                block_ids = pool.allocate(len(block_hashes))
                parent = hashes[first - 1] if first else bytes(16)
                pool.commit(
                    group,
                    block_ids,
                    block_hashes,
                    tenant_id="t",
                    parent_hash=parent,
                    first_block_index=first,
                )
                held.append(block_ids)
        if len(held) > 3:
            pool.release(held.pop(0))
        apply_events(pool, known)
        pool.check()
        found = pool.match(hashes)
        expected = max(n for n in range(len(hashes) + 1) if is_resumable(known, reaches, hashes, n))
        assert found.num_blocks == expected
        num_hits += expected > 0
        for group, (first, ids) in enumerate(zip(found.first_blocks, found.block_ids, strict=True)):
            wanted = hashes[first:expected]
            assert len(ids) == len(wanted)
            for block_id, block_hash in zip(ids, wanted, strict=True):
                block = pool._known[block_id]
                assert block is not None
                assert (block.group, block.block_hash) == (group, block_hash)
    assert num_hits > 10


def test_a_quota_counts_the_blocks_of_all_groups() -> None:
    pool = BlockPool(20, BLOCK_SIZE, reaches=(None, Window(6)))
    hashes = chain("abcd")
    for group in (0, 1):
        block_ids = pool.allocate(4)
        pool.commit(
            group,
            block_ids,
            hashes,
            tenant_id="t",
            parent_hash=bytes(16),
            first_block_index=0,
            kv_quota_tokens=3 * BLOCK_SIZE,
        )
        pool.release(block_ids)
    assert pool.num_blocks_of("t") == 6
    assert pool.quota_tokens_of("t") == 3 * BLOCK_SIZE


def test_a_pin_holds_the_blocks_that_continue_its_prefix() -> None:
    pool = BlockPool(20, BLOCK_SIZE, reaches=(None, Window(6)))
    assert pool.num_pinned_with(chain("abcd")) == 4 + 2
    pool.pin(chain("abcd"))
    assert pool.num_pinned_blocks == 6
    pool.unpin(chain("abcd"))
    assert pool.num_pinned_blocks == 0


def test_the_longest_sequence_follows_the_groups() -> None:
    def most(num_blocks: int, *reaches: Reach) -> int:
        return BlockNeeds(reaches, BLOCK_SIZE, 8).most_tokens(num_blocks, 4000)

    assert most(100, None) == 400
    assert most(100, None, None) == 200
    assert most(100, None, Window(6)) == (100 - 6) * BLOCK_SIZE
    assert most(100, Window(6)) == 4000
    needs = BlockNeeds((None, Window(6), Chunk(9)), BLOCK_SIZE, 8)
    assert needs.peak(40) == 10 + 6 + 7
    assert needs.peak(8) == 6


def test_a_pool_without_room_for_one_window_is_refused() -> None:
    needs = BlockNeeds((None, Window(100)), BLOCK_SIZE, 8)
    with pytest.raises(ConfigError, match=r"holds 40 tokens of a sequence, less than .* of 100"):
        needs.most_tokens(20, 4000)
    assert needs.most_tokens(20, 40) == 40  # no context is longer
