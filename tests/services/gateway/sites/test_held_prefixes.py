"""What a site knows and reports of the prefixes that it holds for others."""

from __future__ import annotations

from random import Random

import msgspec

from services.gateway.sites import held_prefixes
from services.gateway.sites.held_prefixes import MAX_BLOCKS, MAX_MISSES, MIN_SHARES, HeldPrefixes
from services.gateway.sites.site_digest import (
    BYTES_PER_S,
    FIRST_BYTES,
    MESSAGE_BYTES,
    PROMPT_SHARE,
    SNAPSHOT_S,
    DigestPart,
    SiteDigest,
)
from services.gateway.sites.site_requests import site_request
from services.scheduler.sites.site_prefixes import SitePrefixes
from shared.block_hash import extend_packed
from shared.messages import FINGERPRINT_BYTES, PrefixDigest, Request
from shared.packing import pack_hashes, pack_token_ids
from shared.sites.prefix_fingerprints import pack_fingerprints
from tests.services.scheduler.literals import BLOCK_SIZE, submit_of
from tests.support.grids import in_one_test

EACH = 8  # blocks of a fingerprint


def asked(start: int, num_tokens: int, site: str = "a") -> Request:
    """Returns a request of a site, whose tokens begin with `start`."""
    made = submit_of("r", gateway_id=f"{site}/gw").request
    tokens = pack_token_ids([start, *range(num_tokens - 1)])
    hashes = pack_hashes(extend_packed(made.cache_root, tokens, BLOCK_SIZE))
    return msgspec.structs.replace(made, prompt_token_ids=tokens, block_hashes=hashes)


def computed(held: HeldPrefixes, request: Request) -> None:
    held.computed(request, at_this_site(request))


def at_this_site(request: Request) -> Request:
    return site_request(request, b"p" * 16, "gw", b"secret" * 4)


def check(held: HeldPrefixes, num_blocks: int) -> None:
    for each in held.due():
        held.checked(each, min(num_blocks, each.num_blocks))


def digest_of(held: HeldPrefixes, site: str = "a") -> SiteDigest:
    digest = held.digest_of(site)
    assert digest is not None
    return digest


def part(held: HeldPrefixes, now: float = 0.0, site: str = "a") -> DigestPart | None:
    digest = digest_of(held, site)
    digest.heard(now)
    return digest.take(now, num_gateways=1)


def test_a_prefix_is_reported_when_the_index_has_it_and_when_it_is_evicted() -> None:
    held = HeldPrefixes()
    computed(held, asked(1, 400))
    assert part(held) is None
    check(held, 0)
    assert part(held, 1.0) is None, "its events have not arrived"
    check(held, 25)
    first = part(held, 2.0)
    assert first is not None and first.is_first and len(first.added) == 3
    check(held, 20)
    shorter = part(held, 3.0)
    assert shorter == DigestPart(2, False, [], first.added[2:])
    for _ in range(MAX_MISSES):
        check(held, 0)
    gone = part(held, 4.0)
    assert gone == DigestPart(3, False, [], first.added[:2])
    assert (held.num_blocks, held.due()) == (0, [])


def test_a_site_learns_of_its_own_requests_alone() -> None:
    held = HeldPrefixes()
    for site in "ac":
        computed(held, asked(1, 200, site))
    check(held, 100)
    of_a, of_c = part(held, site="a"), part(held, site="c")
    assert of_a is not None and of_c is not None
    assert [len(of_a.added), len(of_c.added)] == [1, 1]
    assert [site for site, _ in held.digests()] == ["a", "c"]


def test_short_prompts_and_zero_retention_leave_nothing() -> None:
    held = HeldPrefixes()
    computed(held, asked(1, 127))
    computed(held, msgspec.structs.replace(asked(1, 400), is_zero_retention=True))
    assert (held.num_blocks, held.digests()) == (0, ())


def test_a_longer_prompt_replaces_the_one_that_it_continues() -> None:
    held = HeldPrefixes()
    computed(held, asked(1, 256))
    check(held, 100)
    assert part(held) is not None
    computed(held, asked(1, 512))
    assert held.num_blocks == 512 // BLOCK_SIZE
    check(held, 100)
    more = part(held, 1.0)
    assert more is not None and (len(more.added), more.removed) == (2, [])
    computed(held, asked(1, 512))
    assert held.num_blocks == 512 // BLOCK_SIZE


def test_a_prompt_shared_by_two_is_reported_until_both_are_gone() -> None:
    """Two prompts with a common start, of which one is evicted."""
    held, common = HeldPrefixes(), asked(1, 256)
    for end in (1, 2):
        tokens = common.prompt_token_ids + pack_token_ids([end] * 128)
        hashes = pack_hashes(extend_packed(common.cache_root, tokens, BLOCK_SIZE))
        request = msgspec.structs.replace(common, prompt_token_ids=tokens, block_hashes=hashes)
        computed(held, request)
    check(held, 100)
    first = part(held)
    assert first is not None and len(first.added) == 4
    one, other = held.due()
    held.checked(one, 0)
    held.checked(other, other.num_blocks)
    gone = part(held, 1.0)
    assert gone is not None and len(gone.removed) == 1


def test_memory_and_checks_are_bounded() -> None:
    held = HeldPrefixes()
    for number in range(60):
        computed(held, asked(number, 20_000))
    assert held.num_blocks <= MAX_BLOCKS // MIN_SHARES
    due = held.due()
    assert sum(each.num_blocks for each in due) <= held_prefixes.CHECKED_BLOCKS_PER_S + 1250
    for each in due:
        held.checked(each, None)
    assert len(held.due()) == len(due)


def test_what_waits_for_an_index_that_does_not_reply_is_checked_later() -> None:
    held = HeldPrefixes()
    computed(held, asked(1, 400))
    for _ in range(10):
        for each in held.due():
            held.checked(each, None)
    check(held, 100)
    assert part(held) is not None


def message(of: DigestPart) -> PrefixDigest:
    return PrefixDigest(
        gateway_id="frankfurt-1/gateway.0123456789ab",
        epoch=2**62,
        sequence_number=of.sequence_number,
        is_first=of.is_first,
        added=pack_fingerprints(of.added),
        removed=pack_fingerprints(of.removed),
    )


def num_bytes(of: DigestPart) -> int:
    """Returns the bytes on the link, with 95 of the subject and nats-server's own."""
    size = len(msgspec.msgpack.encode(message(of))) + 95
    assert size <= MESSAGE_BYTES + FINGERPRINT_BYTES * (len(of.added) + len(of.removed))
    return size


@in_one_test(("num_gateways", "prompt_bytes"), [(1, 0), (4, 0), (1, 4000), (1, 100_000)])
def test_bytes_of_a_link_are_limited(num_gateways: int, prompt_bytes: int) -> None:
    """Of more changes than may be sent; `prompt_bytes` come each second."""
    digest, sent, num_seconds, num_new = SiteDigest(), 0, 500, 20 + prompt_bytes // 100
    for second in range(num_seconds):
        digest.heard(float(second))
        digest.earn(prompt_bytes)
        digest.hold(range(second * num_new, (second + 1) * num_new))
        taken = digest.take(float(second), num_gateways=num_gateways)
        if taken is not None:
            sent += num_bytes(taken)
    most = BYTES_PER_S / num_gateways + prompt_bytes * PROMPT_SHARE
    assert 0.7 * most < (sent - FIRST_BYTES) / num_seconds <= most


def test_changes_are_sent_before_the_rest_of_a_snapshot() -> None:
    digest, evicted = SiteDigest(), list(range(4000, 4100))
    digest.hold(range(5000))
    digest.heard(0.0)
    digest.earn(int(17_000 / PROMPT_SHARE))
    everything = digest.take(0.0, num_gateways=1)
    assert everything is not None and len(everything.added) == 5000
    digest.heard(10.0)
    digest.release(evicted)
    part = digest.take(10.0, num_gateways=1)
    assert part is not None and part.is_first
    assert part.removed == evicted and 100 < len(part.added) < 200


def test_nothing_is_sent_to_a_silent_site_and_a_snapshot_when_it_is_back() -> None:
    digest = SiteDigest()
    digest.hold([1, 2])
    assert digest.take(0.0, num_gateways=1) is None
    digest.heard(0.0)
    assert digest.take(0.0, num_gateways=1) == DigestPart(1, True, [1, 2], [])
    digest.release([1])
    assert digest.take(9.0, num_gateways=1) is None
    digest.heard(10.0)
    assert digest.take(10.0, num_gateways=1) == DigestPart(2, True, [2], [1])
    for second in range(11, 11 + int(SNAPSHOT_S)):
        digest.heard(float(second))
        again = digest.take(float(second), num_gateways=1)
    assert again == DigestPart(3, True, [2], [])


def test_receivers_agree_with_what_is_held_after_any_losses() -> None:
    """One receiver misses messages, and another one none."""
    random = Random(3)
    steady, lossy = SitePrefixes(), SitePrefixes()
    prompts = [asked(number, 1280) for number in range(20)]
    held = HeldPrefixes()
    for second in range(600):
        now = float(second)
        if second < 300:
            computed(held, random.choice(prompts))
            for each in held.due():
                held.checked(each, random.choice([0, EACH, 40, 80]))
        digest = digest_of(held)
        digest.heard(now)
        made = digest.take(now, num_gateways=1)
        if made is None:
            continue
        assert steady.take(message(made), now)
        if second >= 300 or random.random() < 0.9:
            lossy.take(message(made), now)
    truth = {each.tip: each.num_held * EACH for each in _all(held)}
    for each in prompts:
        tip = at_this_site(each).block_hashes[-16:]
        expected = {"frankfurt-1": truth[tip]} if truth.get(tip) else {}
        assert steady.num_blocks(each) == lossy.num_blocks(each) == expected
    assert any(truth.values()) and len(steady) == len(lossy)


def _all(held: HeldPrefixes) -> list[held_prefixes.HeldPrefix]:
    found = held.due()
    assert held.num_blocks == sum(each.num_blocks for each in found)
    return found
