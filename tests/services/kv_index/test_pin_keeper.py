"""Pinned prefixes on real workers with timing engines, which do not compute, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from services.kv_index import pin_keeper
from services.kv_index.pins import PIN_LEASE_S, ExpectedPin, Pins, expected_pin
from shared.block_hash import PUBLIC_TENANT_ID, public_root, root_hash
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    ImagePart,
    KeepPins,
    MatchPrefix,
    ModelCard,
    PinPrefix,
    PinsKept,
    PrefixMatches,
    Role,
)
from shared.packing import (
    TOKEN_ID_BYTES,
    pack_hashes,
    pack_token_ids,
    unpack_hashes,
    unpack_token_ids,
)
from shared.subjects import MATCH
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix, PrefixImage
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TENANT_COPIES, TENANTS, TenantRecord
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SigningKey, TenantCopy
from tests.services.kv_index.rig import Rig, eventually
from tests.support.records import model_card
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.randomness import SeededRandomness
from tests.support.world.workers import BLOCK_SIZE, MODEL, REVISION, SimulatedWorker

NUM_BLOCKS = 4
CARD = model_card(name=MODEL, revision=REVISION, kv_format="k", block_size=BLOCK_SIZE)


def new_prefix(name: str = "house-rules", *, start: int = 3, **fields: object) -> PinnedPrefix:
    token_ids = range(start, start + NUM_BLOCKS * BLOCK_SIZE + 5)
    given = {"tenant_id": "t", "created_at": 900, **fields}
    return PinnedPrefix(
        name=name,
        model=MODEL,
        messages=[{"role": "system", "content": "Be kind."}],
        token_ids=pack_token_ids(token_ids),
        **given,  # type: ignore[arg-type]
    )


def pin_of(prefix: PinnedPrefix, *public: PinnedPrefix) -> ExpectedPin:
    """Returns the pin of a prefix beside public ones."""
    prefixes = PublicPrefixes()
    prefixes.replace(public)
    pin = expected_pin(prefix, CARD, prefixes)
    assert pin is not None
    return pin


def tip_of(prefix: PinnedPrefix, *public: PinnedPrefix) -> bytes:
    return pin_of(prefix, *public).tip_hash


class PinRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.plane = DataPlane()

    async def engine(
        self, worker_id: str, role: Role = "prefill", *, region: str = ""
    ) -> SimulatedWorker:
        worker = SimulatedWorker(
            self.network, self.plane, worker_id, (role,), num_blocks=64, region=region
        )
        await worker.start()
        return worker

    async def save(self, prefix: PinnedPrefix) -> None:
        await pinned_prefix.save(self.store, prefix, 1_000.0)

    async def warm(self, prefix: PinnedPrefix, *workers: SimulatedWorker) -> None:
        for worker in workers:
            await eventually(lambda worker=worker: is_warm(worker, prefix))


def is_warm(worker: SimulatedWorker, prefix: PinnedPrefix) -> bool:
    pin = pin_of(prefix)
    hashes = unpack_hashes(pin.command.block_hashes)
    pool = worker.engine.pool
    return pool.match(hashes).num_blocks == len(hashes) == NUM_BLOCKS and is_pinned(worker, prefix)


def is_pinned(worker: SimulatedWorker, prefix: PinnedPrefix) -> bool:
    return tip_of(prefix) in worker.engine.pool._pins[0]


def scenario(test: Callable[[PinRig], Awaitable[None]]) -> None:
    async def play() -> None:
        rig = PinRig()
        await rig.service.start()
        await asyncio.sleep(1.5)  # the health monitor has received its own heartbeats
        await test(rig)
        await rig.service.stop()

    run(play())


def test_a_round_finds_the_pins_of_equal_workers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,096 pins and 300 workers it took longer than a round."""
    asked: list[str] = []
    expected_of = Pins.expected_of

    def noted(pins: Pins, card: ModelCard, region: str) -> dict[bytes, ExpectedPin]:
        asked.append(region)
        return expected_of(pins, card, region)

    async def test(rig: PinRig) -> None:
        workers = [await rig.engine(f"prefill-{n}", region="de" if n else "fr") for n in range(5)]
        await rig.save(prefix := new_prefix())
        await rig.warm(prefix, *workers)
        monkeypatch.setattr(Pins, "expected_of", noted)
        await rig.service._keeper.round()
        assert asked == ["fr", "de"]

    scenario(test)


def test_images_of_a_prefix_are_read_by_a_gateway_of_its_regions() -> None:
    async def test(rig: PinRig) -> None:
        part = ImagePart(first_token=4, num_tokens=8, image_hash=bytes(16), grid=(0, 0))
        image = PrefixImage(part, b"file")
        prefix = new_prefix(images=[image], revision=REVISION)
        await rig.save(prefix)
        worker = await rig.engine("prefill-1")

        async def reason(text: str) -> None:
            found: str | None = ""
            async with asyncio.timeout(10.0):
                while text not in (found or ""):
                    await asyncio.sleep(0.1)
                    found = await pinned_prefix.reason_of(rig.store, "t", prefix.name)

        await reason("no gateway")
        bus, randomness = rig.network.bus("gateway-1"), SeededRandomness(5)
        gateway = HealthMonitor(bus, rig.clock, randomness, roles=("gateway",))
        await gateway.start()
        await gateway.transition_to("ready")
        await reason("takes no images")  # the worker, which got the command
        assert worker.engine.is_idle
        await gateway.stop()

    scenario(test)


def test_every_worker_of_the_model_retains_the_prefix() -> None:
    async def test(rig: PinRig) -> None:
        workers = [await rig.engine("prefill-0"), await rig.engine("decode-0", "decode")]
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, *workers)
        await asyncio.sleep(3 * PIN_LEASE_S)
        await rig.warm(prefix, *workers)
        assert all(each.is_empty for each in workers)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert (record[b"pin"], record[b"num_tokens"]) == (b"house-rules", b"64")
        assert (record[b"holder:prefill-0"], record[b"holder:decode-0"]) == (b"1", b"1")

    scenario(test)


def test_worker_that_joins_later_receives_all_prefixes() -> None:
    async def test(rig: PinRig) -> None:
        prefixes = [new_prefix("a"), new_prefix("b", start=200), new_prefix("c", start=400)]
        for prefix in prefixes:
            await rig.save(prefix)
        await asyncio.sleep(2)
        worker = await rig.engine("prefill-0")
        for prefix in prefixes:
            await rig.warm(prefix, worker)

    scenario(test)


def test_new_worker_computes_one_prefix_per_round() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        pinned_at: list[float] = []
        pin = worker.worker.pins.pin

        def timed_pin(command: PinPrefix, sequence: object) -> object:
            pinned_at.append(asyncio.get_running_loop().time())
            return pin(command, sequence)  # type: ignore[arg-type]

        worker.worker.pins.pin = timed_pin  # type: ignore[method-assign, assignment]
        for number in range(3):
            await rig.save(new_prefix(f"p{number}", start=3 + 200 * number))
        await asyncio.sleep(8)
        assert len(pinned_at) == 3
        assert pinned_at[1] - pinned_at[0] > 0.9 and pinned_at[2] - pinned_at[1] > 0.9

    scenario(test)


def test_deleted_prefix_is_unpinned() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await pinned_prefix.delete(rig.store, "t", prefix.name)
        await asyncio.sleep(2.5)
        assert not is_pinned(worker, prefix)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert record[b"pin"] == b""

    scenario(test)


def test_expired_prefix_is_unpinned_and_deleted() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix(expires_at=1_001)
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        rig.service._keeper._wall_clock = lambda: 1_001.0
        await asyncio.sleep(2.5)
        assert not is_pinned(worker, prefix)
        assert await pinned_prefix.entries(rig.store, "t") == {}

    scenario(test)


def test_prefix_is_pinned_only_in_regions_that_its_tenant_allows_now() -> None:
    async def test(rig: PinRig) -> None:
        eu_worker = await rig.engine("prefill-0", region="eu")
        us_worker = await rig.engine("prefill-1", region="us")
        admin = TenantAdmin(rig.store, lambda: 0.0)
        await admin.add("t", {"allowed_regions": ["eu"]}, "key-of-t")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, eu_worker)
        await asyncio.sleep(3)
        assert not is_pinned(us_worker, prefix)
        await admin.change("t", {"allowed_regions": ["eu", "us"]})
        await rig.warm(prefix, us_worker)
        await admin.change("t", {"allowed_regions": ["us"]})  # a region less: what is stored goes
        await asyncio.sleep(3)
        assert not is_pinned(eu_worker, prefix) and not is_pinned(us_worker, prefix)
        assert await pinned_prefix.entries(rig.store, "t") == {}

    scenario(test)


def test_prefix_of_another_sites_tenant_follows_the_copy_of_its_record() -> None:
    async def test(rig: PinRig) -> None:
        eu_worker = await rig.engine("prefill-0", region="eu")
        us_worker = await rig.engine("prefill-1", region="us")
        prefix = new_prefix(tenant_id="a/acme")

        async def copied(**fields: Any) -> None:
            record = TenantRecord(tenant_id="acme", **fields)
            signed = SigningKey.of_secret("s").sign(
                TenantCopy(home="a", site="b", version=1, record=record)
            )
            data = msgspec.msgpack.encode(signed)
            await rig.store.write([("HSET", TENANT_COPIES, "a/acme", data)])
            await pinned_prefix.record_change(rig.store, "a/acme")

        await rig.save(prefix)
        await asyncio.sleep(3)
        assert not is_pinned(eu_worker, prefix), "without a copy"
        await copied(allowed_regions=("eu",))
        await rig.warm(prefix, eu_worker)
        await asyncio.sleep(3)
        assert not is_pinned(us_worker, prefix)
        await copied(is_zero_retention=True)
        await eventually(lambda: not is_pinned(eu_worker, prefix))
        assert not is_pinned(us_worker, prefix)

    scenario(test)


def test_no_prefix_is_pinned_for_a_tenant_whose_record_is_unreadable() -> None:
    async def test(rig: PinRig) -> None:
        worker, prefix = await rig.engine("prefill-0"), new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        for record in (b"{", b'{"tenant_id": "t"}'):
            await rig.store.write([("HSET", TENANTS, "t", record)])
            await pinned_prefix.record_change(rig.store, "t")
            await asyncio.sleep(3)
            assert is_pinned(worker, prefix) is (record != b"{")

    scenario(test)


def test_only_tenants_that_changed_are_read_again() -> None:
    async def test(rig: PinRig) -> None:
        prefixes = [new_prefix(tenant_id=f"t{number}") for number in range(20)]
        for each in prefixes:
            await rig.save(each)
        await asyncio.sleep(2.5)
        assert len(rig.service._keeper.pins) == len(prefixes)
        read: list[str] = []
        hash_get = rig.store.hash_get

        async def record(key: str) -> Mapping[bytes, bytes]:
            read.append(key)
            return await hash_get(key)

        rig.store.hash_get = record  # type: ignore[method-assign]
        await rig.save(new_prefix("another", tenant_id="t3", start=200))
        await asyncio.sleep(2.5)
        assert len(rig.service._keeper.pins) == len(prefixes) + 1
        assert {each for each in read if "pinned_prefixes" in each} == {"hearth:t3:pinned_prefixes"}

    scenario(test)


def test_prefix_that_cannot_be_held_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_keeper, "MAX_PINS", 1)

    async def test(rig: PinRig) -> None:
        await rig.engine("prefill-0")
        for name, start in (("a", 100), ("b", 200)):
            await rig.save(new_prefix(name, start=start))
        await asyncio.sleep(2.5)
        assert await pinned_prefix.reason_of(rig.store, "t", "a") is None
        reason = await pinned_prefix.reason_of(rig.store, "t", "b")
        assert reason == "the index holds 1 prefixes already"
        await pinned_prefix.delete(rig.store, "t", "a")
        await asyncio.sleep(2.5)
        assert await pinned_prefix.reason_of(rig.store, "t", "b") is None

    scenario(test)


def test_reasons_follow_their_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another index, of a prefix that is replaced, and of one that is no more."""
    monkeypatch.setattr(pin_keeper, "MAX_PINS", 1)

    async def test(rig: PinRig) -> None:
        def reasons() -> Awaitable[Mapping[str, str]]:
            return pinned_prefix.reasons(rig.store, "t")

        await rig.engine("prefill-0")
        await rig.save(new_prefix("a"))
        await pinned_prefix.explain(rig.store, "t", {"a": "as of another"})
        await asyncio.sleep(2.5)
        assert await reasons() == {}
        full = {"b": "the index holds 1 prefixes already"}
        for start in (100, 200):
            await rig.save(new_prefix("b", start=start))
            await asyncio.sleep(2.5)
            assert await reasons() == full
        with monkeypatch.context() as patched:
            recorded = AsyncMock(side_effect=pinned_prefix.explain)
            patched.setattr(pinned_prefix, "explain", recorded)
            await rig.save(new_prefix("c", tenant_id="other"))
            await asyncio.sleep(2.5)
            assert {each.args[1] for each in recorded.await_args_list} == {"other"}
        await pinned_prefix.delete(rig.store, "other", "c")
        rig.service._keeper._reasons._renew_at = 0.0
        await rig.store.write([("DEL", pinned_prefix._reasons_key("t"))])  # as when it expires
        await asyncio.sleep(2.5)
        assert await reasons() == full
        await pinned_prefix.explain(rig.store, "t", {"a": "as of another"})
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        rig.service = rig.replica("kv_index-0")
        await rig.service.start()
        await asyncio.sleep(2.5)
        assert await reasons() == full
        for name in ("a", "b"):
            await pinned_prefix.delete(rig.store, "t", name)
        await asyncio.sleep(2.5)
        assert await reasons() == {}
        assert not rig.service._keeper._reasons._reasons

    scenario(test)


def test_public_prefix_has_the_public_tenant_and_root() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix(tenant_id=PUBLIC_TENANT_ID)
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        owners = {block.tenant_id for block in worker.engine.pool.cached_blocks()}
        assert owners == {PUBLIC_TENANT_ID}
        assert pin_of(prefix).command.cache_root == public_root(prefix.name, REVISION)

    scenario(test)


def test_prefix_that_starts_with_a_public_one_is_found_by_its_prompts() -> None:
    """Its blocks after the public one are the tenant's, with the hashes that prompts have."""

    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        own = new_prefix("own")
        public = new_prefix(tenant_id=PUBLIC_TENANT_ID)
        two_blocks = public.token_ids[: 2 * BLOCK_SIZE * TOKEN_ID_BYTES]
        public = msgspec.structs.replace(public, token_ids=two_blocks)
        await rig.save(own)
        await rig.warm(own, worker)
        await rig.save(public)
        prompts = PublicPrefixes()
        prompts.replace([public])
        chain = prompts.chain(root_hash("t", REVISION), unpack_token_ids(own.token_ids), CARD)
        assert chain.num_public == 2
        await eventually(lambda: worker.engine.pool.match(chain.hashes).num_blocks == NUM_BLOCKS)
        await _match_prefix(rig, pack_hashes(chain.hashes))
        await asyncio.sleep(0.5)
        record = rig.store.data[f"hearth:t:prefix:{chain.hashes[-1].hex()}"]
        assert (record[b"hits"], record[b"pin"]) == (b"1", b"own")
        owners = [block.tenant_id for block in worker.engine.pool.cached_blocks()]
        assert owners.count(PUBLIC_TENANT_ID) == 2
        await pinned_prefix.delete(rig.store, PUBLIC_TENANT_ID, public.name)
        await rig.warm(own, worker)

    scenario(test)


def test_prefix_with_the_blocks_of_a_public_one_is_not_pinned_twice() -> None:
    pins, public = Pins(), new_prefix(tenant_id=PUBLIC_TENANT_ID)
    for each in (new_prefix("same"), public):
        pins.add(each.digest, each)
    assert [each.prefix for each in pins.expected([CARD]).values()] == [public]
    pins.retain_only({new_prefix("same").digest})
    assert [each.prefix.name for each in pins.expected([CARD]).values()] == ["same"]


def test_pins_are_retained_while_redis_is_away() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        rig.store.is_away = True
        await asyncio.sleep(3 * PIN_LEASE_S)
        assert is_warm(worker, prefix)

    scenario(test)


def test_index_restarted_without_redis_unpins_nothing() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        rig.store.is_away = True
        rig.service = rig.replica("kv_index-0")
        await rig.service.start()
        await asyncio.sleep(0.8 * PIN_LEASE_S)
        assert is_pinned(worker, prefix)
        rig.store.is_away = False
        await asyncio.sleep(2 * PIN_LEASE_S)
        assert is_warm(worker, prefix)

    scenario(test)


def test_second_replica_takes_over_when_the_leader_stops() -> None:
    async def test(rig: PinRig) -> None:
        second = rig.replica("kv_index-1")
        await second.start()
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(2)
        assert (rig.service._keeper._pinned_workers, second._keeper._pinned_workers) == (
            {("prefill-0", "")},
            set(),
        )
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        await asyncio.sleep(2 * PIN_LEASE_S)
        assert is_warm(worker, prefix)
        rig.service = second

    scenario(test)


def test_restarted_worker_is_warmed_again() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await worker.kill()
        again = await rig.engine("prefill-0")
        await rig.warm(prefix, again)

    scenario(test)


def test_no_pin_commands_are_sent_without_pins() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        pins, received = worker.worker.pins, list[KeepPins]()
        renew = pins.renew

        def recorded(command: KeepPins) -> PinsKept:
            received.append(command)
            return renew(command)

        pins.renew = recorded  # type: ignore[method-assign]
        await asyncio.sleep(5)
        assert received == []
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(5)
        assert received

    scenario(test)


def test_hit_counts_continue_after_a_restart() -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        prefix = new_prefix()
        await rig.save(prefix)
        await rig.warm(prefix, worker)
        await asyncio.sleep(0.5)
        hashes = pin_of(prefix).command.block_hashes
        await _match_prefix(rig, hashes)
        await rig.service.drain()
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        rig.service = rig.replica("kv_index-0")
        await rig.service.start()
        await asyncio.sleep(3)
        await _match_prefix(rig, hashes)
        await asyncio.sleep(0.5)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert (record[b"hits"], record[b"saved_tokens"]) == (b"2", b"128")

    scenario(test)


async def _match_prefix(rig: PinRig, block_hashes: bytes) -> None:
    query = MatchPrefix(
        tenant_id="t", model=MODEL, revision=REVISION, block_hashes=block_hashes + bytes(16)
    )
    reply = await rig.scheduler_bus.request(MATCH, query, PrefixMatches, timeout_s=1.0)
    assert [each.num_blocks for each in reply.matches] == [NUM_BLOCKS]


@pytest.mark.parametrize(
    ("prefix", "card"),
    [
        (new_prefix(), msgspec.structs.replace(CARD, name="other")),
        (new_prefix(), msgspec.structs.replace(CARD, max_context_tokens=64)),
        (new_prefix(), msgspec.structs.replace(CARD, block_size=128)),
        (msgspec.structs.replace(new_prefix(), token_ids=b""), CARD),
    ],
)
def test_no_pin_is_expected_of_an_unsuitable_worker(prefix: PinnedPrefix, card: ModelCard) -> None:
    pins = Pins()
    pins.add(prefix.digest, prefix)
    assert pins.expected_of(card, "") == {}


def test_a_worker_of_less_context_hides_no_pin_from_others() -> None:
    pins, prefix = Pins(), new_prefix()
    pins.add(prefix.digest, prefix)
    shorter = msgspec.structs.replace(CARD, max_context_tokens=NUM_BLOCKS * BLOCK_SIZE)
    for card, tips in ((shorter, set()), (CARD, {tip_of(prefix)}), (shorter, set())):
        assert pins.expected_of(card, "").keys() == tips


def test_pins_of_workers_that_are_gone_are_forgotten() -> None:
    pins, prefix = Pins(), new_prefix()
    pins.add(prefix.digest, prefix)
    later = msgspec.structs.replace(CARD, revision="r-later")
    (first,) = pins.expected([CARD]).values()
    pins.retain_cards([CARD, later])
    assert next(iter(pins.expected([CARD]).values())) is first
    pins.retain_cards([later])
    assert next(iter(pins.expected([CARD]).values())) is not first


@pytest.mark.parametrize("fields", [{"max_context_tokens": 16}, {"name": "another"}])
def test_a_pin_is_recorded_beside_other_workers_of_its_weights(fields: dict[str, Any]) -> None:
    async def test(rig: PinRig) -> None:
        worker = await rig.engine("prefill-0")
        card = msgspec.structs.replace(CARD, **fields)
        other = HealthMonitor(
            *(rig.network.bus("prefill-1"), rig.clock, SeededRandomness(3)),
            roles=("prefill",),
            model=card,
        )
        await other.start()
        await other.transition_to("ready")
        await asyncio.sleep(1)
        await rig.save(prefix := new_prefix())
        await rig.warm(prefix, worker)
        await asyncio.sleep(2)
        record = rig.store.data[f"hearth:t:prefix:{tip_of(prefix).hex()}"]
        assert record[b"pin"] == prefix.name.encode()
        await other.stop()

    scenario(test)


def test_cache_salt_changes_the_cache_root() -> None:
    salted = pin_of(new_prefix(cache_salt="s"), new_prefix(tenant_id=PUBLIC_TENANT_ID))
    assert salted.command.cache_root == root_hash("t", REVISION, cache_salt="s")
