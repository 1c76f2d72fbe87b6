"""A public prefix is all tenants'; the first block behind it is nobody else's."""

from __future__ import annotations

import pytest

from shared.block_hash import (
    PUBLIC_TENANT_ID,
    extend_chain,
    public_root,
    root_after_public,
    root_hash,
)
from shared.engine.batching.sequence import Sequence
from shared.errors import InvalidRequest
from shared.messages import SamplingParams
from tests.shared.engine.support.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt

NUM_PUBLIC = 2
PUBLIC = prompt(NUM_PUBLIC * BLOCK_SIZE)


def behind_public(
    tenant_id: str, more: list[int], sampling: SamplingParams | None = None
) -> Sequence:
    """As the gateway hashes a prompt that begins with the public prefix."""
    sequence = new_sequence([*PUBLIC, *more], sampling, tenant_id=tenant_id)
    public = extend_chain(public_root("house-rules", "weights"), PUBLIC, BLOCK_SIZE)
    root = root_after_public(root_hash(tenant_id, "weights"), public[-1])
    sequence.block_hashes = public + extend_chain(root, more, BLOCK_SIZE)
    sequence.num_public_blocks = NUM_PUBLIC
    return sequence


def test_no_tenant_and_salt_makes_a_public_root() -> None:
    assert public_root("a", "w") not in {
        root_hash("a", "w"),
        root_hash("public:a", "w"),
        root_hash("a", "", cache_salt="w"),
        root_hash("", "w", cache_salt="a"),
    }


def test_tenants_share_it_and_nothing_behind_it() -> None:
    rig = Rig()
    more = prompt(3 * BLOCK_SIZE, start=500)
    first = behind_public("a", more, greedy(4))
    rig.complete(first)
    other = behind_public("b", more, greedy(4))
    rig.complete(other)
    assert other.num_cached_tokens == len(PUBLIC)
    again = behind_public("a", more, greedy(4))
    rig.complete(again)
    assert again.num_cached_tokens == len(PUBLIC) + 2 * BLOCK_SIZE  # the last token is computed


@pytest.mark.parametrize("num_more", [0, 1, BLOCK_SIZE - 1])
def test_what_is_generated_behind_it_is_the_tenants_own(num_more: int) -> None:
    """Also where the prompt ends with the public prefix, so that only the engine hashes on."""
    rig = Rig()
    more = prompt(num_more, start=500)
    drawn = rig.complete(behind_public("a", more, greedy(4 * BLOCK_SIZE)))
    stolen = behind_public("b", [*more, *drawn], greedy(1))
    rig.complete(stolen)
    assert stolen.num_cached_tokens == len(PUBLIC)
    own = behind_public("a", [*more, *drawn], greedy(1))
    rig.complete(own)
    assert own.num_cached_tokens >= len(PUBLIC) + 2 * BLOCK_SIZE


def test_its_blocks_are_told_as_nobodys() -> None:
    rig = Rig()
    rig.complete(behind_public("a", prompt(BLOCK_SIZE, start=500), greedy(1)))
    owners = [(each.block_index, each.tenant_id) for each in rig.engine.pool.cached_blocks()]
    assert sorted(owners) == [(0, PUBLIC_TENANT_ID), (1, PUBLIC_TENANT_ID), (2, "a")]


def test_more_public_blocks_than_hashes_are_refused() -> None:
    """The engine would hash what is missing, and cannot know the public root."""
    sequence = behind_public("a", [])
    sequence.block_hashes = sequence.block_hashes[:1]
    with pytest.raises(InvalidRequest, match="2 public"):
        Rig().engine.add(sequence)
