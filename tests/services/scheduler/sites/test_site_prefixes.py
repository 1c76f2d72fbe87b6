"""What a scheduler makes of the digests of other sites."""

from __future__ import annotations

import msgspec

from services.scheduler.sites.site_prefixes import (
    MAX_FINGERPRINTS,
    MAX_GATEWAYS,
    MAX_PER_S,
    MIN_SHARES,
    SILENT_S,
    SitePrefixes,
)
from shared.messages import MAX_DIGEST_FINGERPRINTS, PrefixDigest, Request
from shared.sites.prefix_fingerprints import PrefixFingerprints, pack_fingerprints
from tests.services.scheduler.literals import submit_of

NUM_TOKENS = 1280  # ten fingerprints


def request(tenant_id: str = "tenant", num_tokens: int = NUM_TOKENS) -> Request:
    return submit_of("r", tenant_id=tenant_id, num_prompt_tokens=num_tokens).request


def prints(of: Request, num: int) -> list[int]:
    made = PrefixFingerprints(of.cache_root, of.block_hashes, of.block_size)
    return [made.at(index) for index in range(num)]


def digest(
    number: int,
    added: list[int],
    gateway: str = "b/gw",
    *,
    is_first: bool = False,
    **fields: object,
) -> PrefixDigest:
    made = PrefixDigest(
        gateway_id=gateway,
        epoch=7,
        sequence_number=number,
        is_first=is_first,
        added=pack_fingerprints(added),
    )
    return msgspec.structs.replace(made, **fields)


def removal(number: int, removed: list[int], gateway: str = "b/gw") -> PrefixDigest:
    return digest(number, [], gateway, removed=pack_fingerprints(removed))


def test_depth_of_a_prompt_at_a_site() -> None:
    for num in range(11):
        prefixes = SitePrefixes()
        prefixes.take(digest(1, prints(request(), num), is_first=True), 0.0)
        assert prefixes.num_blocks(request()) == ({"b": 8 * num} if num else {})


def test_sites_and_gateways_hold_prefixes_of_different_lengths() -> None:
    prefixes = SitePrefixes()
    held = {"b/gw": 3, "b/other": 9, "c/gw": 9, "d/gw": 1, "e/gw": 0, "f/gw": 10, "f/other": 2}
    for gateway, num in held.items():
        prefixes.take(digest(1, prints(request(), num), gateway, is_first=True), 0.0)
    assert prefixes.num_blocks(request()) == {"b": 72, "c": 72, "d": 8, "f": 80}
    assert prefixes.num_blocks(request(num_tokens=300)) == {"b": 16, "c": 16, "d": 8, "f": 16}
    assert prefixes.num_blocks(request(num_tokens=127)) == {}
    assert prefixes.num_blocks(request("another")) == {}
    prefixes.lost("b/other")
    assert prefixes.num_blocks(request())["b"] == 24
    prefixes.take(removal(2, prints(request(), 10)[4:], "f/gw"), 1.0)
    assert prefixes.num_blocks(request())["f"] == 32


def test_blocks_of_a_public_prefix_count_for_the_tenant_that_sent_them() -> None:
    """Their hashes are those of all tenants, but another site holds them for each."""
    one = request("one")
    other = msgspec.structs.replace(request("two"), block_hashes=one.block_hashes)
    prefixes = SitePrefixes()
    prefixes.take(digest(1, prints(one, 10), is_first=True), 0.0)
    assert (prefixes.num_blocks(one), prefixes.num_blocks(other)) == ({"b": 80}, {})


def test_a_gap_drops_a_gateway_until_its_next_snapshot() -> None:
    prefixes, held = SitePrefixes(), prints(request(), 10)
    assert not prefixes.take(digest(1, held), 0.0), "its first messages were missed"
    assert prefixes.take(digest(2, held[:4], is_first=True), 0.0)
    assert prefixes.take(digest(2, held[:4], is_first=True), 0.0), "twice"
    assert prefixes.num_blocks(request()) == {"b": 32}
    assert not prefixes.take(digest(4, held), 0.0)
    assert (prefixes.num_blocks(request()), len(prefixes)) == ({}, 0)
    assert prefixes.take(digest(5, held[:2], is_first=True), 0.0)
    assert prefixes.num_blocks(request()) == {"b": 16}
    assert not prefixes.take(digest(6, held, epoch=8), 0.0), "another process"
    assert prefixes.num_blocks(request()) == {}


def test_a_snapshot_changes_nothing_for_those_in_step() -> None:
    prefixes, held = SitePrefixes(), prints(request(), 10)
    prefixes.take(digest(1, held, is_first=True), 0.0)
    assert prefixes.take(digest(2, held[:3], is_first=True), 0.0)
    assert prefixes.num_blocks(request()) == {"b": 80}


def test_a_prompt_is_looked_up_among_those_of_its_class() -> None:
    prefixes, held = SitePrefixes(), prints(request(), 10)
    of = {name: msgspec.structs.replace(request(), region_class=name) for name in ("", "eu", "us")}
    prefixes.take(digest(1, held[:2], is_first=True), 0.0)
    prefixes.take(digest(1, held[:5], is_first=True, region_class="eu"), 0.0)
    prefixes.take(digest(1, held, "c/gw", is_first=True, region_class="eu"), 0.0)
    found = {name: prefixes.num_blocks(each) for name, each in of.items()}
    assert found == {"": {"b": 16}, "eu": {"b": 40, "c": 80}, "us": {}}
    assert prefixes.take(digest(2, held[2:3]), 1.0), "each class has numbers of its own"
    assert prefixes.num_blocks(of[""]) == {"b": 24}
    assert not prefixes.take(digest(3, held, region_class="eu"), 1.0)
    assert (prefixes.num_blocks(of[""]), prefixes.num_blocks(of["eu"])) == ({"b": 24}, {"c": 80})
    prefixes.withdraw("c", "eu")
    assert (len(prefixes), prefixes.num_blocks(of["eu"])) == (3, {})
    prefixes.take(digest(4, held, is_first=True, region_class="eu"), 1.0)
    prefixes.lost("b/gw")
    assert len(prefixes) == 0


def test_a_silent_gateway_is_dropped() -> None:
    prefixes = SitePrefixes()
    prefixes.take(digest(1, prints(request(), 10), is_first=True), 0.0)
    prefixes.drop_silent(SILENT_S)
    assert len(prefixes) == 10
    prefixes.drop_silent(SILENT_S + 1)
    assert len(prefixes) == 0


def test_a_hostile_site_gets_its_share_of_memory_and_time() -> None:
    prefixes, honest = SitePrefixes(), prints(request(), 10)
    prefixes.take(digest(1, honest, "c/gw", is_first=True), 0.0)
    number, num_taken = 1, 0
    for second in range(20):
        for _ in range(8):
            start = number * MAX_DIGEST_FINGERPRINTS
            many = list(range(start, start + MAX_DIGEST_FINGERPRINTS))
            num_taken += prefixes.take(digest(number, many, is_first=True), float(second))
            number += 1
    assert num_taken <= 22 * MAX_PER_S / MAX_DIGEST_FINGERPRINTS
    for second in range(100, 120):  # slowly
        start = number * MAX_DIGEST_FINGERPRINTS
        many = list(range(start, start + MAX_DIGEST_FINGERPRINTS))
        assert prefixes.take(digest(number, many, is_first=True), float(second))
        number += 1
    assert len(prefixes) == MAX_FINGERPRINTS // MIN_SHARES + 10
    prefixes.lost("b/gw")
    for gateway in range(MAX_GATEWAYS * 2):
        for region_class in ("", "eu"):
            made = digest(1, [gateway], f"b/gw{gateway}", is_first=True, region_class=region_class)
            assert prefixes.take(made, 200.0 + gateway)
    assert len(prefixes) <= 2 * MAX_GATEWAYS + 10
    assert prefixes.num_blocks(request()) == {"c": 80}


def test_a_prefix_with_holes_ends_somewhere() -> None:
    prefixes, held = SitePrefixes(), prints(request(), 10)
    prefixes.take(digest(1, held[::2], is_first=True), 0.0)
    assert prefixes.num_blocks(request())["b"] in range(8, 81, 8)
