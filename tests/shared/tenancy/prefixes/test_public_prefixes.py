"""Public prefixes of several models."""

from __future__ import annotations

import msgspec

from shared.block_hash import PUBLIC_TENANT_ID
from shared.packing import pack_token_ids
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from tests.services.gateway.peer import CARD


def test_prefix_is_of_its_model_also_beside_one_of_equal_weights() -> None:
    token_ids = list(range(3, 3 + 2 * CARD.block_size))
    prefix = PinnedPrefix(
        name="house",
        tenant_id=PUBLIC_TENANT_ID,
        model=CARD.name,
        messages=[],
        token_ids=pack_token_ids(token_ids),
        created_at=0,
    )
    other = msgspec.structs.replace(CARD, name="other")
    for cards in ((CARD, other), (other, CARD)):
        public = PublicPrefixes()
        public.replace([prefix])
        shared = {each.name: public.chain(b"root", token_ids, each).num_public for each in cards}
        assert shared == {CARD.name: 2, "other": 0}
    keys = [b"a", b"a", b"b"]
    public = PublicPrefixes(lambda: keys.pop())
    public.replace([prefix])
    *_, last = chains = [public.chain(b"root", token_ids, CARD) for _ in range(3)]
    assert chains[1] == last != chains[0], "of the key that is in use"
