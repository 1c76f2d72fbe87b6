"""What a site knows and reports of the prefixes that it holds for others."""

from __future__ import annotations

from random import Random

import msgspec

from services.gateway.sites import held_prefixes
from services.gateway.sites.held_prefixes import MAX_BLOCKS, MAX_MISSES, MIN_SHARES, HeldPrefixes
from services.gateway.sites.site_digest import (
    BYTES_PER_S,
    CLASS_BYTES,
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
from shared.subjects import in_class
from tests.services.scheduler.literals import BLOCK_SIZE, submit_of
from tests.support.grids import in_one_test

EACH = 8  # blocks of a fingerprint


def asked(
    start: int,
    num_tokens: int,
    site: str = "a",
    *,
    tenant_id: str = "tenant",
    region_class: str = "",
) -> Request:
    """Returns a request of a site, whose tokens begin with `start`."""
    made = submit_of("r", gateway_id=f"{site}/gw", tenant_id=tenant_id).request
    tokens = pack_token_ids([start, *range(num_tokens - 1)])
    hashes = pack_hashes(extend_packed(made.cache_root, tokens, BLOCK_SIZE))
    return msgspec.structs.replace(
        made, prompt_token_ids=tokens, block_hashes=hashes, region_class=region_class
    )


def computed(held: HeldPrefixes, request: Request) -> None:
    held.computed(request, at_this_site(request))


def at_this_site(request: Request) -> Request:
    return site_request(request, b"p" * 16, "gw", b"secret" * 4, retains_class=True)


def check(held: HeldPrefixes, num_blocks: int) -> None:
    for each in held.due():
        held.checked(each, min(num_blocks, each.num_blocks))


def digest_of(held: HeldPrefixes, site: str = "a", region_class: str = "") -> SiteDigest:
    return dict(held.digests())[site, region_class]


def part(
    held: HeldPrefixes, now: float = 0.0, site: str = "a", region_class: str = ""
) -> DigestPart | None:
    digest = digest_of(held, site, region_class)
    digest.heard(now)
    return digest.take(now, num_shares=1)


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
    assert [site for (site, _), _ in held.digests()] == ["a", "c"]


def test_prefixes_of_a_region_class_are_in_a_digest_of_their_own() -> None:
    held = HeldPrefixes()
    computed(held, asked(1, 200))
    computed(held, asked(2, 400, tenant_id="bound", region_class="eu"))
    check(held, 100)
    of_none, of_class = part(held), part(held, region_class="eu")
    assert of_none is not None and of_class is not None
    assert [len(of_none.added), len(of_class.added)] == [1, 3]
    assert [each.region_class for each in held.due()] == ["", "eu"]


def test_prompt_of_a_tenant_that_gets_a_class_is_known_by_the_class_alone() -> None:
    held, classes = HeldPrefixes(), ("", "eu")
    computed(held, asked(1, 256))
    check(held, 100)
    first = part(held)
    assert first is not None and len(first.added) == 2
    computed(held, asked(1, 256, region_class="eu"))
    check(held, 100)
    of_none, of_class = (part(held, 1.0, region_class=each) for each in classes)
    assert of_none == DigestPart(2, False, [], first.added)
    assert of_class == DigestPart(1, True, first.added, [])
    computed(held, asked(1, 384))
    check(held, 100)
    of_none, of_class = (part(held, 2.0, region_class=each) for each in classes)
    assert of_none is not None and len(of_none.added) == 3
    assert of_class == DigestPart(2, False, [], first.added)


@in_one_test(("region_class", "name"), [("", "a/bound"), ("eu", "a/bound"), ("eu", "")])
def test_what_is_withdrawn_is_named_by_no_message_and_forgotten(
    region_class: str, name: str
) -> None:
    """Of a tenant, or of all classes if `name` is empty. Some of it was evicted just before."""
    held, receiver = HeldPrefixes(), SitePrefixes()
    bound = asked(1, 640, tenant_id="bound", region_class=region_class)
    evicted = asked(2, 256, tenant_id="bound", region_class=region_class)
    other = asked(3, 256, region_class="" if name == "" else region_class)
    for each in (bound, evicted, other):
        computed(held, each)
    check(held, 100)

    def send(now: float) -> list[PrefixDigest]:
        sent = []
        for (_, of), digest in held.digests():
            digest.heard(now)
            made = digest.take(now, num_shares=1)
            if made is not None:
                sent.append(message(made, of))
                assert receiver.take(sent[-1], now)
        return sent

    send(0.0)
    assert [receiver.num_blocks(each) for each in (bound, other)] == [
        {"frankfurt-1": 40},
        {"frankfurt-1": 16},
    ]
    for each in held.due():
        held.checked(each, 0 if each.block_hashes == at_this_site(evicted).block_hashes else 100)
    if name:
        held.withdraw_tenant(name)
        held.withdraw_tenant("a/nobody")
    else:
        held.withdraw_classes("a")
    sent = send(1.0)
    assert [each.is_first for each in sent] == [True]
    assert sent[0].removed == b""
    assert len(sent[0].added) == (2 * FINGERPRINT_BYTES if name else 0)
    assert [receiver.num_blocks(each) for each in (bound, evicted)] == [{}, {}]
    assert receiver.num_blocks(other) == {"frankfurt-1": 16}
    assert len(receiver) == 2 and send(2.0) == []
    computed(held, bound)
    check(held, 100)
    send(3.0)
    assert receiver.num_blocks(bound) == {"frankfurt-1": 40}, "as if for the first time"


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


def message(of: DigestPart, region_class: str = "") -> PrefixDigest:
    return PrefixDigest(
        gateway_id="frankfurt-1/gateway.0123456789ab",
        epoch=2**62,
        sequence_number=of.sequence_number,
        is_first=of.is_first,
        added=pack_fingerprints(of.added),
        removed=pack_fingerprints(of.removed),
        region_class=region_class,
    )


def num_bytes(of: DigestPart, region_class: str = "") -> int:
    """Returns the bytes on the link, with 95 of the subject and nats-server's own."""
    in_subject = len(in_class("hearth.v1", region_class)) - len("hearth.v1")
    size = len(msgspec.msgpack.encode(message(of, region_class))) + 95 + in_subject
    of_class = CLASS_BYTES + 2 * len(region_class) if region_class else 0
    most = MESSAGE_BYTES + of_class + FINGERPRINT_BYTES * (len(of.added) + len(of.removed))
    assert size <= most
    return size


@in_one_test(
    ("num_shares", "prompt_bytes", "region_class"),
    [(1, 0, ""), (4, 0, ""), (1, 4000, "eu"), (1, 100_000, ""), (1, 0, "e" * 64)],
)
def test_bytes_of_a_link_are_limited(num_shares: int, prompt_bytes: int, region_class: str) -> None:
    """Of more changes than may be sent; `prompt_bytes` come each second."""
    digest, sent, num_seconds = SiteDigest(region_class), 0, 500
    num_new = 20 + prompt_bytes // 100
    for second in range(num_seconds):
        digest.heard(float(second))
        digest.earn(prompt_bytes)
        digest.hold(range(second * num_new, (second + 1) * num_new))
        taken = digest.take(float(second), num_shares=num_shares)
        if taken is not None:
            sent += num_bytes(taken, region_class)
    most = BYTES_PER_S / num_shares + prompt_bytes * PROMPT_SHARE
    assert 0.7 * most < (sent - FIRST_BYTES) / num_seconds <= most


def test_changes_are_sent_before_the_rest_of_a_snapshot() -> None:
    digest, evicted = SiteDigest(), list(range(4000, 4100))
    digest.hold(range(5000))
    digest.heard(0.0)
    digest.earn(int(17_000 / PROMPT_SHARE))
    everything = digest.take(0.0, num_shares=1)
    assert everything is not None and len(everything.added) == 5000
    digest.heard(10.0)
    digest.release(evicted)
    part = digest.take(10.0, num_shares=1)
    assert part is not None and part.is_first
    assert part.removed == evicted and 100 < len(part.added) < 200


def test_nothing_is_sent_to_a_silent_site_and_a_snapshot_when_it_is_back() -> None:
    digest = SiteDigest()
    digest.hold([1, 2])
    assert digest.take(0.0, num_shares=1) is None
    digest.heard(0.0)
    assert digest.take(0.0, num_shares=1) == DigestPart(1, True, [1, 2], [])
    digest.release([1])
    assert digest.take(9.0, num_shares=1) is None
    digest.heard(10.0)
    assert digest.take(10.0, num_shares=1) == DigestPart(2, True, [2], [1])
    for second in range(11, 11 + int(SNAPSHOT_S)):
        digest.heard(float(second))
        again = digest.take(float(second), num_shares=1)
    assert again == DigestPart(3, True, [2], [])


def test_receivers_agree_with_what_is_held_after_any_losses() -> None:
    """One receiver misses messages, and another one none."""
    random = Random(3)
    steady, lossy = SitePrefixes(), SitePrefixes()
    tenants = [("one", ""), ("two", ""), ("three", "eu"), ("four", "eu"), ("five", "world")]
    prompts = [
        asked(number, 1280, tenant_id=tenants[number % 5][0], region_class=tenants[number % 5][1])
        for number in range(20)
    ]
    held = HeldPrefixes()
    for second in range(600):
        now = float(second)
        if second < 300:
            computed(held, random.choice(prompts))
            for each in held.due():
                held.checked(each, random.choice([0, EACH, 40, 80]))
            if random.random() < 0.1:
                held.withdraw_tenant(f"a/{random.choice(tenants)[0]}")
        for (_, region_class), digest in held.digests():
            digest.heard(now)
            made = digest.take(now, num_shares=3)
            if made is None:
                continue
            assert steady.take(message(made, region_class), now)
            if second >= 300 or random.random() < 0.9:
                lossy.take(message(made, region_class), now)
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
