"""All tenants share the blocks of a public prefix; the blocks after it belong to one tenant."""

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
from tests.support.engine.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt

NUM_PUBLIC = 2
PUBLIC = prompt(NUM_PUBLIC * BLOCK_SIZE)


def sequence_after_public(
    tenant_id: str, more: list[int], sampling: SamplingParams | None = None
) -> Sequence:
    """A prompt that starts with the public prefix, with the hashes that the gateway computes."""
    sequence = new_sequence([*PUBLIC, *more], sampling, tenant_id=tenant_id)
    public = extend_chain(public_root("house-rules", "weights"), PUBLIC, BLOCK_SIZE)
    root = root_after_public(root_hash(tenant_id, "weights"), public[-1])
    sequence.block_hashes = public + extend_chain(root, more, BLOCK_SIZE)
    sequence.num_public_blocks = NUM_PUBLIC
    return sequence


def test_public_root_differs_from_tenant_roots() -> None:
    assert public_root("a", "w") not in {
        root_hash("a", "w"),
        root_hash("public:a", "w"),
        root_hash("a", "", cache_salt="w"),
        root_hash("", "w", cache_salt="a"),
    }


def test_tenants_share_only_the_public_prefix() -> None:
    rig = Rig()
    more = prompt(3 * BLOCK_SIZE, start=500)
    first = sequence_after_public("a", more, greedy(4))
    rig.complete(first)
    other = sequence_after_public("b", more, greedy(4))
    rig.complete(other)
    assert other.num_cached_tokens == len(PUBLIC)
    again = sequence_after_public("a", more, greedy(4))
    rig.complete(again)
    assert again.num_cached_tokens == len(PUBLIC) + 2 * BLOCK_SIZE  # the last token is computed


@pytest.mark.parametrize("num_more", [0, 1, BLOCK_SIZE - 1])
def test_output_after_public_prefix_is_not_shared(num_more: int) -> None:
    """Also if the prompt ends with the public prefix: then only the engine adds hashes."""
    rig = Rig()
    more = prompt(num_more, start=500)
    sampled = rig.complete(sequence_after_public("a", more, greedy(4 * BLOCK_SIZE)))
    foreign = sequence_after_public("b", [*more, *sampled], greedy(1))
    rig.complete(foreign)
    assert foreign.num_cached_tokens == len(PUBLIC)
    own = sequence_after_public("a", [*more, *sampled], greedy(1))
    rig.complete(own)
    assert own.num_cached_tokens >= len(PUBLIC) + 2 * BLOCK_SIZE


def test_public_blocks_have_the_public_tenant_id() -> None:
    rig = Rig()
    rig.complete(sequence_after_public("a", prompt(BLOCK_SIZE, start=500), greedy(1)))
    owners = [(each.block_index, each.tenant_id) for each in rig.engine.pool.cached_blocks()]
    assert sorted(owners) == [(0, PUBLIC_TENANT_ID), (1, PUBLIC_TENANT_ID), (2, "a")]


def test_more_public_blocks_than_hashes_are_rejected() -> None:
    """The engine cannot add the missing hashes: it does not know the public root."""
    sequence = sequence_after_public("a", [])
    sequence.block_hashes = sequence.block_hashes[:1]
    with pytest.raises(InvalidRequest, match="2 public"):
        Rig().engine.add(sequence)
