"""Limits on a real Redis: admission, refunds, and operation without Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.errors import (
    ConcurrencyExhausted,
    ExceedsLimit,
    InputTokensExhausted,
    LimitIsZero,
    OutputTokensExhausted,
    RequestsExhausted,
)
from services.gateway.tenancy.limits import RENEW_S, Limits
from services.gateway.tenancy.request_cost import LimitLease, RequestCost
from shared.clock import Clock, MonotonicClock
from shared.store import RedisStore, StoreUnavailable
from shared.tenancy.rate_limit import LEASE_S, LimitState
from shared.tenancy.tenant import TenantRecord, meter_of, open_requests_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S, until
from tests.support.world.clock import VirtualClock, run
from tests.support.world.store import MemoryStore


class PacedClock:
    """Real time, but `sleep` returns only when `advance` passes its end."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return MonotonicClock().now() + self.offset_s

    async def sleep(self, delay_s: float) -> None:
        wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now() + delay_s, wakeup))
        await wakeup

    def advance(self, seconds: float) -> None:
        self.offset_s += seconds
        for sleeper in list(self._sleepers):
            if sleeper[0] <= self.now():
                self._sleepers.remove(sleeper)
                if not sleeper[1].done():
                    sleeper[1].set_result(None)


@pytest.fixture
def clock() -> PacedClock:
    return PacedClock()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield store
    await store.close()


@pytest.fixture
async def limits(store: RedisStore, clock: PacedClock) -> AsyncIterator[Limits]:
    limits = Limits(store, clock)
    limits.start()
    yield limits
    await limits.stop()


def tenant(**fields: Any) -> TenantRecord:
    return TenantRecord(tenant_id="acme", **fields)


async def state(store: RedisStore, record: TenantRecord) -> LimitState:
    return await TenantAdmin(store, lambda: 0.0).state(record)


async def admit(limits: Limits, record: TenantRecord, name: str, *tokens: int) -> LimitLease:
    return await limits.admit(record, name, RequestCost(*(tokens or (1, 1))))


async def test_unlimited_tenant_needs_no_redis_call(limits: Limits, store: RedisStore) -> None:
    lease = await admit(limits, tenant(kv_quota_tokens=5), "a", 10**9, 10**9)
    assert lease.headers == {}
    limits.settle(lease, 5)
    assert limits.num_open == limits.num_unsettled == 0
    assert await store.evaluate("return redis.call('DBSIZE')", [], []) == 0


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("requests_per_min", RequestsExhausted),
        ("input_tokens_per_min", InputTokensExhausted),
        ("output_tokens_per_min", OutputTokensExhausted),
        ("concurrency", ConcurrencyExhausted),
    ],
)
async def test_each_limit_rejects_with_own_error_and_retry_after(
    limits: Limits, name: str, error_type: type[Exception]
) -> None:
    record = tenant(**{name: 2})
    for number in range(2):
        await admit(limits, record, f"r{number}")
    with pytest.raises(error_type) as caught:
        await admit(limits, record, "r2")
    assert caught.value.http_status == 429
    assert name in caught.value.message
    assert 0 < caught.value.retry_after_s <= 30
    assert limits.num_open == 2


async def test_emptied_redis_counts_from_zero_for_all_gateways(
    limits: Limits, store: RedisStore, clock: PacedClock
) -> None:
    record, other = tenant(requests_per_min=3), Limits(store, clock)
    for number in range(3):
        await admit(limits, record, f"before-{number}")
    await store.write([("FLUSHALL",)])
    for gateway, name in ((limits, "a"), (other, "b"), (limits, "c")):
        await admit(gateway, record, name)
    for gateway, name in ((limits, "d"), (other, "e")):
        with pytest.raises(RequestsExhausted):
            await admit(gateway, record, name)


async def test_open_requests_return_to_an_emptied_redis(
    limits: Limits, store: RedisStore, clock: PacedClock
) -> None:
    record, other = tenant(concurrency=1), Limits(store, clock)
    await admit(limits, record, "a")
    await store.write([("FLUSHALL",)])
    clock.advance(RENEW_S)
    await until_renewed(store, open_requests_of("acme"))
    with pytest.raises(ConcurrencyExhausted):
        await admit(other, record, "next")


@pytest.mark.parametrize(
    "name",
    [
        *("requests_per_min", "input_tokens_per_min", "output_tokens_per_min"),
        *("concurrency", "kv_quota_tokens"),
    ],
)
async def test_limit_of_zero_rejects_requests(limits: Limits, name: str) -> None:
    with pytest.raises(LimitIsZero, match=name):
        await admit(limits, tenant(**{name: 0}), "a", 0, 0)
    with pytest.raises(LimitIsZero, match=name):
        limits.check(tenant(**{name: 0}))


async def test_oversized_request_exceeds_limit(limits: Limits) -> None:
    with pytest.raises(ExceedsLimit) as caught:
        await admit(limits, tenant(input_tokens_per_min=5), "a", 6, 1)
    assert caught.value.param == "messages"
    with pytest.raises(ExceedsLimit) as caught:
        await admit(limits, tenant(output_tokens_per_min=5), "a", 1, 6)
    assert caught.value.param == "max_tokens"


async def test_two_gateways_share_one_limit(
    redis_server: RedisServer, limits: Limits, store: RedisStore, clock: PacedClock
) -> None:
    other, record = Limits(store, clock), tenant(concurrency=3, requests_per_min=100)
    leases = [await admit(limits, record, "a"), await admit(other, record, "b")]
    leases.append(await admit(other, record, "c"))
    for each in (limits, other):
        with pytest.raises(ConcurrencyExhausted):
            await admit(each, record, "d")
    other.settle(leases[1], 1)
    assert await other.flush()
    await admit(limits, record, "e")
    current = await state(store, record)
    assert current.num_open == 3
    assert 3.5 < current.used["requests_per_min"] <= 4


async def test_late_reply_does_not_multiply_a_limit(
    redis_server: RedisServer, store: RedisStore, clock: PacedClock
) -> None:
    stores = [RedisStore(redis_server.url, MonotonicClock()) for _ in range(2)]
    gateways = [Limits(each, clock, lambda: 2) for each in stores]
    record, early = TenantRecord(tenant_id="late", concurrency=3), tenant(concurrency=99)
    for number in range(20):
        for each in gateways:
            await admit(each, early, f"{number}")
    await store._redis.client_pause(200)
    asked = [
        admit(each, record, f"{n}-{place}") for n in range(8) for place, each in enumerate(gateways)
    ]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(each, LimitLease) for each in found) == 3
    for each in stores:
        await each.close()


async def test_burst_of_a_tenant_leaves_connections_and_time_to_others(
    redis_server: RedisServer, store: RedisStore, clock: PacedClock
) -> None:
    """A new key of another tenant is checked while 1,000 requests wait for their admission."""
    shared = RedisStore(redis_server.url, MonotonicClock())
    limits, keys = Limits(shared, clock), ApiKeys(shared, MonotonicClock())
    await TenantAdmin(store, lambda: 0.0).add("other", {}, "k1")
    before = await store._redis.info("clients")
    burst = [
        asyncio.create_task(admit(limits, tenant(concurrency=1000), f"{n}")) for n in range(1000)
    ]
    await asyncio.sleep(0)
    assert (await keys.tenant_of("Bearer k1")).tenant_id == "other"
    assert not all(each.done() for each in burst)
    leases = await asyncio.gather(*burst)
    assert all(each.is_charged for each in leases) and shared.load().num_failures == 0
    info = await store._redis.info("clients")
    assert info["connected_clients"] - before["connected_clients"] < 100
    await shared.close()


async def test_settled_request_never_blocks_the_next(store: RedisStore, clock: PacedClock) -> None:
    limits, record = Limits(store, clock), tenant(concurrency=1)  # not started: never flushes
    for number in range(5):
        lease = await admit(limits, record, f"r{number}")
        limits.settle(lease, 0)
        limits.settle(lease, 0)
    assert (await state(store, record)).num_open == 1  # the last one is not flushed yet
    await limits.stop()
    assert (await state(store, record)).num_open == 0
    assert limits.num_unsettled == 0


async def test_unused_output_tokens_are_refunded_once(limits: Limits, store: RedisStore) -> None:
    record = tenant(output_tokens_per_min=1000)
    lease = await admit(limits, record, "a", 1, 900)
    with pytest.raises(OutputTokensExhausted):
        await admit(limits, record, "b", 1, 200)
    limits.settle(lease, 100)
    limits.settle(lease, 0)
    await until(lambda: not limits.num_unsettled)
    await limits.flush()
    used = (await state(store, record)).used["output_tokens_per_min"]
    assert 80 < used <= 100  # less what has drained since


async def test_settled_requests_are_flushed_in_background(
    limits: Limits, store: RedisStore
) -> None:
    record = tenant(concurrency=500)
    leases = [await admit(limits, record, f"r{n}") for n in range(400)]
    for lease in leases:
        limits.settle(lease, 0)
    await until(lambda: not limits.num_unsettled)
    assert (await state(store, record)).num_open == 0


async def test_only_live_gateways_renew_leases(
    redis_server: RedisServer, store: RedisStore, clock: PacedClock
) -> None:
    record = tenant(concurrency=9)
    alive, dead = Limits(store, clock), Limits(store, clock)
    alive.start()
    await admit(alive, record, "a")
    await admit(dead, record, "b")
    name = open_requests_of("acme")
    await store.write([("ZADD", name, 1, "a", 1, "b")])  # as if both leases had expired
    clock.advance(RENEW_S)
    await until_renewed(store, name)
    assert (await state(store, record)).num_open == 1
    await alive.stop()


class DistantStore:
    """A Redis at 200 ms, in virtual time."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        await asyncio.sleep(0.2)
        return await self._store.evaluate(script, keys, arguments)


def test_leases_of_many_tenants_do_not_expire_in_a_distant_redis() -> None:
    async def open_for_a_minute() -> None:
        store, clock = MemoryStore(), VirtualClock()
        limits, other = Limits(DistantStore(store), clock), Limits(store, clock)
        limits.start()
        records = [TenantRecord(tenant_id=f"t{n}", concurrency=1) for n in range(300)]
        leases = await asyncio.gather(*[limits.admit(each, "a") for each in records])
        for _ in range(12):
            await clock.sleep(5)
            for record in records:
                with pytest.raises(ConcurrencyExhausted):
                    await other.admit(record, "b")
        for lease in leases:
            limits.settle(lease, 0)
        await clock.sleep(2)  # one round trip for each tenant would take a minute
        for record in records:
            await other.admit(record, "b")
        await limits.stop()

    run(open_for_a_minute())


async def until_renewed(store: RedisStore, name: str) -> None:
    script = "return redis.call('ZSCORE', KEYS[1], 'a')"
    async with asyncio.timeout(LIMIT_S):
        while float(await store.evaluate(script, [name], []) or 0) < 10:
            await asyncio.sleep(0.01)


async def test_request_cancelled_during_redis_call_is_refunded(
    redis_server: RedisServer, clock: PacedClock, store: RedisStore
) -> None:
    limits, record = Limits(store, clock), tenant(concurrency=1, output_tokens_per_min=10)
    await state(store, record)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        admitting = asyncio.create_task(admit(limits, record, "a", 1, 10))
        await asyncio.sleep(0.05)
        admitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admitting
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert limits.num_open == 0
    await until_flushed(limits)
    await admit(limits, record, "b", 1, 10)


async def until_flushed(limits: Limits) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await limits.flush():
            await asyncio.sleep(0.01)


# ── without Redis ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


async def test_local_counter_decides_without_redis(
    own_server: RedisServer, clock: PacedClock
) -> None:
    store = RedisStore(own_server.url, MonotonicClock())
    limits = Limits(store, clock)
    record = tenant(requests_per_min=3, output_tokens_per_min=1000)
    lease = await admit(limits, record, "a", 1, 600)
    own_server.stop()
    second = await admit(limits, record, "b", 1, 400)
    with pytest.raises(OutputTokensExhausted):
        await admit(limits, record, "c", 1, 100)
    limits.settle(lease, 0)
    await admit(limits, record, "c", 1, 600)
    with pytest.raises(RequestsExhausted) as caught:
        await admit(limits, record, "d", 1, 1)
    assert caught.value.headers["x-ratelimit-limit-requests"] == "3"
    limits.settle(second, 400)
    assert limits.num_unsettled  # retained until Redis is back
    assert not await limits.flush()
    own_server.start()
    await until_flushed(limits)
    assert limits.num_unsettled == 0
    await store.close()


async def test_gateways_without_redis_share_a_limit(clock: PacedClock) -> None:
    """Each counts alone: together they admit no more than the limit."""
    store = MemoryStore()
    store.is_away = True
    gateways = [Limits(store, clock, lambda: 3) for _ in range(3)]
    record = tenant(requests_per_min=7, concurrency=1)
    for number, limits in enumerate(gateways):
        await admit(limits, record, f"{number}", 1, 1)  # one at least
        with pytest.raises(ConcurrencyExhausted):
            await admit(limits, record, f"{number}-more", 1, 1)
    record, num_admitted = TenantRecord(tenant_id="u", requests_per_min=7), 0
    for limits in gateways:
        for number in range(4):
            with contextlib.suppress(RequestsExhausted):
                await admit(limits, record, f"u{number}", 1, 1)
                num_admitted += 1
    assert num_admitted == 6


def local_limits(clock: Clock, num_gateways: int = 10) -> Limits:
    store = MemoryStore()
    store.is_away = True
    return Limits(store, clock, lambda: num_gateways)


def test_ended_requests_drain_a_part_no_faster() -> None:
    async def admitted_in_ten_minutes() -> int:
        clock, num_admitted = VirtualClock(), 0
        limits, record = local_limits(clock), tenant(requests_per_min=600)
        while clock.now() < 600:
            with contextlib.suppress(RequestsExhausted):
                lease = await admit(limits, record, f"{num_admitted}")
                num_admitted += 1
                await clock.sleep(0.1)
                limits.settle(lease, 1)
            await clock.sleep(0.1)
        return num_admitted

    assert 600 < run(admitted_in_ten_minutes()) <= 660


async def test_answers_without_redis_name_the_part_that_decided(clock: PacedClock) -> None:
    limits, record = local_limits(clock), tenant(requests_per_min=20)
    leases = [await admit(limits, record, f"{number}") for number in range(2)]
    assert leases[1].headers["x-ratelimit-limit-requests"] == "2"
    assert leases[1].headers["x-ratelimit-remaining-requests"] == "0"
    for _ in range(2):  # decided, and closed since
        with pytest.raises(RequestsExhausted, match=r"part 2 of .* of 20 is") as caught:
            await admit(limits, record, "c")
        assert caught.value.headers["x-ratelimit-limit-requests"] == "2"


async def test_request_larger_than_the_part_takes_an_empty_meter(clock: PacedClock) -> None:
    """As it is told to: a retry after the time that an answer names is admitted."""
    limits, record = local_limits(clock), tenant(output_tokens_per_min=600)
    lease = await admit(limits, record, "a", 1, 500)
    limits.settle(lease, 30)  # of 60: the part
    with pytest.raises(OutputTokensExhausted) as caught:
        await admit(limits, record, "b", 1, 500)
    assert 29 < caught.value.retry_after_s <= 30
    clock.advance(caught.value.retry_after_s)
    await admit(limits, record, "b", 1, 500)
    with pytest.raises(OutputTokensExhausted):
        await admit(limits, record, "c", 1, 1)
    with pytest.raises(ExceedsLimit):
        await admit(limits, record, "d", 1, 601)


class FailingStore:
    """The real store, which raises StoreUnavailable while `is_down`."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.is_down = False

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if self.is_down:
            raise StoreUnavailable("the line is cut")
        return await self._store.evaluate(script, keys, arguments)


async def test_locally_admitted_request_is_not_refunded_in_redis(
    store: RedisStore, clock: PacedClock
) -> None:
    failing_store = FailingStore(store)
    limits, record = Limits(failing_store, clock), tenant(output_tokens_per_min=600)
    limits.start()
    charged = await admit(limits, record, "a", 1, 400)
    failing_store.is_down = True
    local = await admit(limits, record, "b", 1, 200)
    failing_store.is_down = False
    assert charged.is_charged and not local.is_charged
    clock.advance(RENEW_S)  # sends the lease of the local request to Redis
    await until_open(store, record, 2)
    limits.settle(local, 0)
    await until(lambda: not limits.num_unsettled)
    current = await state(store, record)
    assert current.used["output_tokens_per_min"] > 300
    assert current.num_open == 1
    await limits.stop()


async def test_rejected_tokens_free_the_local_place_too(
    store: RedisStore, clock: PacedClock
) -> None:
    failing_store = FailingStore(store)
    limits = Limits(failing_store, clock)
    record = tenant(concurrency=1, input_tokens_per_min=100)
    lease = await limits.charge(await limits.admit(record, "a"), RequestCost(90, 0))
    limits.settle(lease, 0)
    second = await limits.admit(record, "b")
    with pytest.raises(InputTokensExhausted):
        await limits.charge(second, RequestCost(90, 0))
    limits.settle(second, 0)
    failing_store.is_down = True
    await limits.admit(record, "c")


async def test_unreadable_counter_affects_its_own_tenant_only(
    limits: Limits, store: RedisStore
) -> None:
    await store.write([("SET", meter_of("acme"), "text")])
    record = tenant(requests_per_min=2)
    for number in range(2):
        limits.settle(await admit(limits, record, f"r{number}"), 0)
    with pytest.raises(RequestsExhausted):
        await admit(limits, record, "r2")
    sound = TenantRecord(tenant_id="sound", requests_per_min=1)
    limits.settle(await limits.admit(sound, "s", RequestCost(1, 1)), 0)
    await until(lambda: not limits.num_unsettled)
    with pytest.raises(RequestsExhausted):
        await limits.admit(sound, "t", RequestCost(1, 1))


async def test_exhausted_tenant_is_rejected_without_redis_call(
    limits: Limits, store: RedisStore, clock: PacedClock
) -> None:
    record = tenant(requests_per_min=1)
    limits.check(record)
    await admit(limits, record, "a")
    with pytest.raises(RequestsExhausted):
        await admit(limits, record, "b")
    with pytest.raises(RequestsExhausted) as caught:
        limits.check(record)
    assert 59 < caught.value.retry_after_s <= 60
    limits.check(tenant(requests_per_min=2))  # the limit was raised
    clock.advance(60)
    limits.check(record)


async def test_idle_tenant_is_removed(limits: Limits, clock: PacedClock) -> None:
    limits.settle(await admit(limits, tenant(requests_per_min=5), "a"), 0)
    await until(lambda: not limits.num_unsettled)
    clock.advance(300)
    await until(lambda: not limits._accounts)


async def test_unsent_settlements_are_dropped_when_leases_expire(
    own_server: RedisServer, clock: PacedClock
) -> None:
    store = RedisStore(own_server.url, MonotonicClock())
    limits = Limits(store, clock)
    limits.start()
    lease = await admit(limits, tenant(concurrency=1), "a")
    own_server.stop()
    limits.settle(lease, 0)
    await asyncio.sleep(0)
    clock.advance(LEASE_S + 1)
    await until(lambda: not limits.num_unsettled)
    await limits.stop()
    await store.close()


async def until_open(store: RedisStore, record: TenantRecord, num_open: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await state(store, record)).num_open != num_open:
            await asyncio.sleep(0.01)


async def test_tokens_are_charged_to_an_admitted_request(limits: Limits, store: RedisStore) -> None:
    """Its place under `concurrency` is its own, and its request is not charged twice."""
    record = tenant(requests_per_min=10, concurrency=1, output_tokens_per_min=100)
    first = await limits.admit(record, "a")
    assert (await state(store, record)).used["output_tokens_per_min"] == 0
    lease = await limits.charge(first, RequestCost(5, 80))
    current = await state(store, record)
    assert current.num_open == limits.num_open == 1
    assert current.used["requests_per_min"] == pytest.approx(1, abs=0.1)
    assert current.used["output_tokens_per_min"] == pytest.approx(80, abs=1)
    with pytest.raises(ConcurrencyExhausted):
        await limits.admit(record, "b")
    limits.settle(first, 0)  # replaced: settles nothing
    assert limits.num_open == 1
    limits.settle(lease, 20)
    assert await limits.flush()
    current = await state(store, record)
    assert current.num_open == 0
    assert current.used["output_tokens_per_min"] == pytest.approx(20, abs=1)


async def test_rejected_tokens_end_the_request_and_leave_it_charged(
    limits: Limits, store: RedisStore
) -> None:
    record = tenant(requests_per_min=10, concurrency=1, input_tokens_per_min=100)
    lease = await limits.charge(await limits.admit(record, "a"), RequestCost(90, 0))
    limits.settle(lease, 0)
    second = await limits.admit(record, "b")
    with pytest.raises(InputTokensExhausted):
        await limits.charge(second, RequestCost(90, 0))
    limits.settle(second, 0)
    assert limits.num_open == 0
    current = await state(store, record)
    assert current.num_open == 0
    assert current.used["requests_per_min"] == pytest.approx(2, abs=0.1)
    assert current.used["input_tokens_per_min"] == pytest.approx(90, abs=1)


async def test_tenant_without_token_limits_has_one_order(
    limits: Limits, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await limits.admit(tenant(concurrency=1), "a")
    monkeypatch.setattr(store, "evaluate", None)
    assert await limits.charge(lease, RequestCost(10**6, 10**6)) is lease
    monkeypatch.undo()
    limits.settle(lease, 0)
