"""Orders to drop the KV of a tenant, followed by real workers with timing engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from shared.messages import MAX_DROPPED_TENANTS, CountTenantKv, Role, TenantKvCounted
from shared.sites.tenant_names import names_of
from shared.store import StoreUnavailable
from shared.subjects import tenant_kv
from shared.tenancy.deletion import kv_drops, tenant_data
from shared.tenancy.deletion.kv_drops import KvDrop, OrderedDrop
from shared.tenancy.deletion.tenant_data import DELETE_RECORDS_LUA
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.kv_index.rig import Rig, block, eventually
from tests.services.kv_index.test_pin_keeper import NUM_BLOCKS, new_prefix
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.store import MemoryStore
from tests.support.world.workers import Peer, SimulatedWorker, request_of

PROMPT = list(range(3, 103))  # six full blocks, and a part
FIRST = kv_drops.first_number(1_000.0) + 1


class DropRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.plane = DataPlane()
        self.peer = Peer(self.network)

    async def engine(
        self, worker_id: str, role: Role = "decode", *, region: str = ""
    ) -> SimulatedWorker:
        worker = SimulatedWorker(
            self.network, self.plane, worker_id, (role,), num_blocks=64, region=region
        )
        await worker.start()
        return worker

    async def serve(self, worker: SimulatedWorker, tenant_id: str, **fields: object) -> bytes:
        """Starts a request of the tenant."""
        request = request_of(PROMPT, tenant_id=tenant_id, max_tokens=4)
        request = msgspec.structs.replace(request, **fields)
        return await self.peer.place(worker.worker_id, request)

    async def cache(self, worker: SimulatedWorker, *tenant_ids: str) -> None:
        for each in tenant_ids:
            placement_id = await self.serve(worker, each)
            await self.peer.finished(placement_id)
            await self.peer.acknowledge(worker.worker_id, placement_id)

    async def finished(self, number: int, within_s: float = 5.0) -> OrderedDrop:
        async with asyncio.timeout(within_s):
            while True:
                found = {each.drop.number: each for each in await kv_drops.orders(self.store)}
                if found[number].is_finished:
                    return found[number]
                await asyncio.sleep(0.01)

    async def tokens_of(self, worker: SimulatedWorker, tenant_id: str) -> TenantKvCounted:
        subject = tenant_kv(worker.worker.roles.handled[0], worker.worker_id)
        command = CountTenantKv(tenant_id=tenant_id)
        return await self.peer.bus.request(subject, command, TenantKvCounted, timeout_s=1.0)


def scenario(test: Callable[[DropRig], Awaitable[None]]) -> None:
    async def play() -> None:
        rig = DropRig()
        await rig.service.start()
        await rig.peer.start()
        await asyncio.sleep(2.5)  # the index can judge who is alive
        await test(rig)
        await rig.peer.stop()
        await rig.service.stop()

    run(play())


def cached(worker: SimulatedWorker, tenant_id: str) -> int:
    worker.engine.pool.check()
    return worker.engine.pool.num_blocks_of(tenant_id)


def test_zero_retention_drops_what_is_cached_within_two_heartbeats() -> None:
    async def test(rig: DropRig) -> None:
        workers = [await rig.engine("decode-0"), await rig.engine("decode-1")]
        admin = TenantAdmin(rig.store, lambda: 1_000.0)
        await admin.add("acme", {}, "key-of-acme")
        for worker in workers:
            await rig.cache(worker, "acme", "other")
        await asyncio.sleep(1)
        assert all(cached(each, "acme") == 6 for each in workers)
        assert (await rig.tokens_of(workers[0], "acme")).num_cached_tokens == 96
        assert rig.store.data["hearth:acme:prefixes"]
        began_at = asyncio.get_running_loop().time()
        await admin.change("acme", {"is_zero_retention": True})
        done = await rig.finished(FIRST)
        assert asyncio.get_running_loop().time() - began_at < 0.6
        assert done.progress is not None
        assert (done.progress.num_workers, done.progress.num_blocks) == (2, 12)
        for worker in workers:
            assert (cached(worker, "acme"), cached(worker, "other")) == (0, 6)
        await asyncio.sleep(1)  # the records that were not written yet
        assert not rig.store.data["hearth:acme:prefixes"]
        assert not [each for each in rig.store.data if each.startswith("hearth:acme:prefix:")]
        assert rig.store.data["hearth:other:prefixes"]
        (line,) = rig.store.data["hearth:audit:deletions"]
        assert line[b"who"] == b"kv_index-0" and b'"reason":"zero_retention"' in line[b"arguments"]

    scenario(test)


def test_order_reaches_a_tenant_of_another_site_under_either_name() -> None:
    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        names = [each for tenant_id in ("a/acme", "a/umbrella") for each in names_of(tenant_id)]
        await rig.cache(worker, *names)
        await asyncio.sleep(1)
        assert [cached(worker, each) for each in names] == [6] * 4
        records = [tenant_data.prefix_records_of(each) for each in names]
        assert all(rig.store.data[each] for each in records)
        await kv_drops.order(rig.store, "a/acme", "regions", 1_000.0)
        await rig.finished(FIRST)
        assert [cached(worker, each) for each in names] == [0, 0, 6, 6]
        await asyncio.sleep(1)
        assert [bool(rig.store.data.get(each)) for each in records] == [False, False, True, True]
        queued = await rig.serve(worker, names[1])
        await rig.peer.finished(queued)
        assert cached(worker, names[1]) == 0, "as if it had been sent before"

    scenario(test)


def test_more_names_than_one_command_takes_are_dropped() -> None:
    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        await rig.cache(worker, "a/acme")
        tenants = [*(f"a/t{number}" for number in range(MAX_DROPPED_TENANTS)), "a/acme"]
        drops = {
            FIRST + number: KvDrop(tenant_id=each, reason="regions", ordered_at=1_000.0)
            for number, each in enumerate(tenants)
        }
        await rig.store.write(
            [
                *(("HSET", kv_drops.ORDERS, n, msgspec.json.encode(d)) for n, d in drops.items()),
                ("SET", kv_drops.LAST, max(drops)),
            ]
        )
        await rig.finished(max(drops))
        assert cached(worker, "a/acme") == 0

    scenario(test)


@pytest.mark.parametrize("ordered_at", [1_000.0, 10.0])
def test_request_sent_before_the_switch_leaves_nothing(ordered_at: float) -> None:
    """Also if the clock of who orders is behind that of the index by a quarter of an hour."""

    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        running = await rig.serve(worker, "acme")
        drop = await kv_drops.order(rig.store, "acme", "zero_retention", ordered_at)
        await rig.finished(drop.number)
        queued = await rig.serve(worker, "acme")
        for each in (running, queued):
            await rig.peer.finished(each)
        assert cached(worker, "acme") == 0

    scenario(test)


def test_removed_tenant_is_dropped_once_its_requests_have_ended() -> None:
    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        request = request_of(PROMPT, tenant_id="acme", max_tokens=4_000)
        placement_id = await rig.peer.place("decode-0", request)
        await rig.peer.has_tokens(placement_id, 1)
        await kv_drops.order(rig.store, "acme", "removed", 1_000.0)
        await asyncio.sleep(1)
        (order,) = await kv_drops.orders(rig.store)
        assert order.progress is not None and order.progress.waiting == ("decode-0",)
        assert (await rig.tokens_of(worker, "acme")).num_held_tokens >= 96
        await rig.peer.abort("decode-0", placement_id)
        await rig.finished(FIRST)
        assert worker.is_empty and cached(worker, "acme") == 0

    scenario(test)


def test_workers_in_the_regions_that_are_kept_drop_the_kv_too() -> None:
    """They have announced it to indexes outside, too."""

    async def test(rig: DropRig) -> None:
        inside = await rig.engine("decode-0", region="fr")
        outside = await rig.engine("decode-1", region="us")
        for worker in (inside, outside):
            await rig.cache(worker, "acme")
        await kv_drops.order(rig.store, "acme", "regions", 1_000.0, ("fr", "de"))
        await rig.finished(FIRST)
        assert (cached(inside, "acme"), cached(outside, "acme")) == (0, 0)

    scenario(test)


def test_worker_that_was_silent_drops_the_kv_when_it_is_back() -> None:
    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        await rig.cache(worker, "acme")
        worker.process.freeze()
        await asyncio.sleep(5)
        await kv_drops.order(rig.store, "acme", "removed", 1_000.0)
        await rig.finished(FIRST)  # by all that are alive
        worker.process.thaw()
        async with asyncio.timeout(5):
            while cached(worker, "acme"):
                await asyncio.sleep(0.01)

    scenario(test)


def test_records_of_a_worker_that_follows_late_are_deleted() -> None:
    """It reports what it holds before it gets the order."""

    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        await rig.cache(worker, "acme", "other")
        worker.process.freeze()
        await asyncio.sleep(5)
        await kv_drops.order(rig.store, "acme", "regions", 1_000.0)
        await rig.finished(FIRST)
        assert not rig.store.data.get("hearth:acme:prefixes")
        worker.process.thaw()
        async with asyncio.timeout(5):
            while cached(worker, "acme"):
                await asyncio.sleep(0.01)
        await asyncio.sleep(2)  # what was reported is written
        assert not [each for each in rig.store.data if each.startswith("hearth:acme:prefix:")]
        assert not rig.store.data["hearth:acme:prefixes"]
        assert rig.store.data["hearth:other:prefixes"]

    scenario(test)


def test_prefix_that_is_deleted_after_the_order_is_not_pinned_again() -> None:
    """A removal orders first. Until it has deleted the prefixes the index has them pinned."""

    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0")
        prefix = new_prefix("rules", tenant_id="acme")
        await pinned_prefix.save(rig.store, prefix, 1_000.0)
        await eventually(lambda: cached(worker, "acme") == NUM_BLOCKS)
        await kv_drops.order(rig.store, "acme", "removed", 1_000.0)
        await rig.finished(FIRST)
        await asyncio.sleep(3)
        assert cached(worker, "acme") == 0
        assert "had to drop" in (await pinned_prefix.reasons(rig.store, "acme"))["rules"]
        await tenant_data.delete(rig.store, "acme")
        await asyncio.sleep(3)
        assert cached(worker, "acme") == 0
        left = {name for name, each in rig.store.data.items() if "acme:" in name and each}
        assert left == set()

    scenario(test)


class FlakyStore(MemoryStore):
    """Redis is away when records of prefixes are deleted for the first time."""

    num_lost = 1

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if script == DELETE_RECORDS_LUA and self.num_lost:
            self.num_lost -= 1
            raise StoreUnavailable("away")
        return await super().evaluate(script, keys, arguments)


def test_records_of_all_orders_are_forgotten_though_redis_goes_away_meanwhile() -> None:
    async def test() -> None:
        rig = Rig()
        rig.store = FlakyStore()
        replica = rig.replica("kv_index-1")
        for number, tenant_id in enumerate(("acme", "other")):
            replica._registry.stored(
                "decode-0",
                tenant_id=tenant_id,
                model="m",
                revision="r1",
                num_tokens=16,
                num_bytes=1,
                parent_hash=b"",
                tip_hash=block(number),
            )
            await kv_drops.order(rig.store, tenant_id, "removed", 1_000.0)
        for num_left in (1, 0):
            await replica._dropper.round()
            assert replica._registry.num_pending == num_left

    run(test())


def test_an_order_outlives_a_redis_that_is_emptied() -> None:
    """Who gave it takes it as given; the worker is silent all the while."""

    async def test(rig: DropRig) -> None:
        others = [await rig.engine("decode-0"), await rig.engine("decode-1")]
        for worker in others:
            await rig.cache(worker, "acme")
        others[1].process.freeze()
        await kv_drops.order(rig.store, "acme", "removed", 1_000.0)
        await asyncio.sleep(0.5)
        rig.store.data.clear()
        await asyncio.sleep(0.5)
        await kv_drops.order(rig.store, "later", "removed", 1_001.0)
        others[1].process.thaw()
        await rig.finished(kv_drops.first_number(1_001.0) + 1)
        await asyncio.sleep(1.0)
        assert [cached(each, "acme") for each in others] == [0, 0]
        assert len(rig.store.data["hearth:audit:deletions"]) == 2

    scenario(test)


def test_finished_orders_are_forgotten_after_a_day() -> None:
    async def test(rig: DropRig) -> None:
        await kv_drops.order(rig.store, "acme", "removed", 1_000.0)
        await rig.finished(FIRST)
        await kv_drops.order(rig.store, "late", "removed", 1_000.0 + kv_drops.RETENTION_S + 1)
        assert [each.drop.number for each in await kv_drops.orders(rig.store)] == [FIRST + 1]
        assert list(rig.store.data[kv_drops.PROGRESS]) == []

    scenario(test)
