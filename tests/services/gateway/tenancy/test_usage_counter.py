"""Counts reach Redis exactly once, even if commands or replies are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import structlog.testing

from services.gateway.tenancy.usage_counter import (
    ADD_UP,
    MAX_PER_BATCH,
    RETRY_REJECTED_S,
    UsageCounter,
    day_of,
    last_batch_of,
)
from shared.clock import MonotonicClock
from shared.store import RedisStore, StoreUnavailable
from shared.tenancy.tenant import TenantRecord, UsageKind, UsageRow, usage_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.store import MemoryStore

DAY_S = 86_400.0
NOON = 1_700_000_000.0 // DAY_S * DAY_S + DAY_S / 2
DAY = "2023-11-14"
COUNTS: dict[UsageKind, int] = {
    "requests": 1,
    "input_tokens": 100,
    "cached_tokens": 0,
    "output_tokens": 7,
}


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        self.time += delay_s
        await asyncio.sleep(0)


class WallClock:
    def __init__(self) -> None:
        self.seconds = NOON

    def __call__(self) -> float:
        return self.seconds


class FaultyStore:
    """The real store; the next `num_lost_…` commands or replies are lost."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.num_lost_replies = 0
        self.num_lost_commands = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if self.num_lost_commands:
            self.num_lost_commands -= 1
            raise StoreUnavailable("lost on the way")
        reply = await self._store.evaluate(script, keys, arguments)
        if self.num_lost_replies:
            self.num_lost_replies -= 1
            raise StoreUnavailable("done, and not heard")
        return reply


class SlowStore(MemoryStore):
    """Command n takes n rounds of the event loop; those of `lost` then fail."""

    def __init__(self, lost: Sequence[int]) -> None:
        super().__init__()
        self._lost = lost
        self._num_commands = 0

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        self._num_commands += 1
        number = self._num_commands
        for _ in range(number):
            await asyncio.sleep(0)
        if number in self._lost:
            raise StoreUnavailable("lost on the way")
        return await super().evaluate(script, keys, arguments)


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[FaultyStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield FaultyStore(store)
    await store.close()


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture
def usage(store: FaultyStore, wall: WallClock) -> UsageCounter:
    return UsageCounter(store, ManualClock(), writer_id="gateway-1-x", now=wall)


def named(tenant_id: str) -> TenantRecord:
    return TenantRecord(tenant_id=tenant_id, created_at=NOON)


async def rows(store: Any, *tenant_ids: str, days: Sequence[str] = (DAY,)) -> list[UsageRow]:
    return await TenantAdmin(store, lambda: NOON).usage(tenant_ids or ("acme",), days)


def row(day: str = DAY, tenant_id: str = "acme", model: str = "m", times: int = 1) -> UsageRow:
    amounts = {kind: amount * times for kind, amount in COUNTS.items()}
    return UsageRow(tenant_id=tenant_id, day=day, model=model, **amounts)


async def test_usage_is_counted_by_tenant_model_and_day(
    usage: UsageCounter, store: FaultyStore, wall: WallClock
) -> None:
    for tenant_id, model in (("acme", "m"), ("acme", "org/m:1"), ("other", "m"), ("acme", "m")):
        usage.count(named(tenant_id), model, COUNTS)
    wall.seconds += DAY_S / 2
    usage.count(named("acme"), "m", COUNTS)  # midnight in UTC: the next day
    assert await usage.flush()
    days = (DAY, day_of(wall.seconds))
    assert await rows(store, "acme", "other", "none", days=days) == [
        row(times=2),
        row(model="org/m:1"),
        row(day="2023-11-15"),
        row(tenant_id="other"),
    ]
    assert usage.num_pending == 0


async def test_batch_with_lost_reply_is_counted_once(
    usage: UsageCounter, store: FaultyStore
) -> None:
    usage.count(named("acme"), "m", COUNTS)
    store.num_lost_replies = 3
    for _ in range(3):
        assert not await usage.flush()
        usage.count(named("acme"), "m", COUNTS)  # later counts wait for the next batch
    assert await usage.flush()
    assert await rows(store) == [row(times=4)]


async def test_batch_with_lost_command_is_sent_again(
    usage: UsageCounter, store: FaultyStore
) -> None:
    usage.count(named("acme"), "m", COUNTS)
    store.num_lost_commands = 2
    assert not await usage.flush()
    usage.count(named("acme"), "m", COUNTS)
    assert not await usage.flush()
    assert await usage.flush()
    assert await rows(store) == [row(times=2)]


async def test_counts_of_writers_and_restarts_add_up(store: FaultyStore, wall: WallClock) -> None:
    for writer_id in ("gateway-1-a", "gateway-2-b", "gateway-1-c"):
        counter = UsageCounter(store, ManualClock(), writer_id=writer_id, now=wall)
        counter.count(named("acme"), "m", COUNTS)
        await counter.stop()
    assert await rows(store) == [row(times=3)]


async def test_many_counts_need_several_batches(usage: UsageCounter, store: FaultyStore) -> None:
    tenants = [f"t{number}" for number in range(MAX_PER_BATCH)]
    for tenant_id in tenants:
        usage.count(named(tenant_id), "m", COUNTS)
    assert await usage.flush()
    assert await rows(store, *tenants) == [row(tenant_id=each) for each in tenants]
    last = await store.hash_get(last_batch_of("gateway-1-x"))
    assert int(last[b"number"]) == 3  # three kinds that are not zero


async def test_flushes_at_the_same_time_lose_nothing(wall: WallClock) -> None:
    """As of a gateway that drains: the periodic flush, and the one of the drain."""
    store = SlowStore(lost=[3])
    usage = UsageCounter(store, ManualClock(), writer_id="gateway-1-x", now=wall)
    usage.count(named("acme"), "m", COUNTS)
    flushes = [asyncio.create_task(usage.flush()) for _ in range(2)]
    await asyncio.sleep(0)
    usage.count(named("acme"), "m", COUNTS)  # the next batch
    await asyncio.gather(*flushes)
    assert await usage.flush()
    assert await rows(store) == [row(times=2)]


async def test_stop_flushes_pending_counts(usage: UsageCounter, store: FaultyStore) -> None:
    usage.start()
    usage.count(named("acme"), "m", COUNTS)
    store.num_lost_replies = store.num_lost_commands = 2
    await usage.stop()
    assert await rows(store) == [row()]


async def test_running_requests_are_counted_every_five_seconds(store: FaultyStore) -> None:
    clock = ManualClock()
    times: list[float] = []
    is_enough = asyncio.Event()

    def count_running() -> None:
        times.append(clock.time)
        if len(times) == 3:
            is_enough.set()

    usage = UsageCounter(store, clock, writer_id="gateway-1-x", now=WallClock())
    usage.start(count_running)
    await is_enough.wait()
    await usage.stop()
    assert times[:3] == [105.0, 110.0, 115.0]


async def test_unstored_counts_are_logged(usage: UsageCounter, store: FaultyStore) -> None:
    usage.count(named("acme"), "m", COUNTS)
    store.num_lost_commands = 10**9
    assert not await usage.flush()
    usage.count(named("acme"), "m", COUNTS)
    with structlog.testing.capture_logs() as logs:
        await usage.stop()
    logged = {each["kind"]: each["amount"] for each in logs if each["event"] == "usage_not_stored"}
    assert logged == {"requests": 2, "input_tokens": 200, "output_tokens": 14}


async def test_unreadable_record_delays_its_own_counts_only(
    usage: UsageCounter, store: FaultyStore
) -> None:
    name = usage_of("acme", DAY)
    await store.write([("SET", name, "text"), ("HSET", usage_of("other", DAY), "requests:m", "x")])
    usage.count(named("acme"), "m", COUNTS)
    usage.count(named("other"), "m", COUNTS)
    usage.count(named("sound"), "m", COUNTS)
    store.num_lost_replies = 1
    assert not await usage.flush()
    assert await usage.flush()
    assert await rows(store, "sound") == [row(tenant_id="sound")]
    other = await store.hash_get(usage_of("other", DAY))
    assert other == {b"requests:m": b"x", b"input_tokens:m": b"100", b"output_tokens:m": b"7"}
    assert usage.num_pending == 4
    await store.write([("DEL", name), ("HDEL", usage_of("other", DAY), "requests:m")])
    usage._clock.time += RETRY_REJECTED_S  # type: ignore[attr-defined]
    assert await usage.flush()
    assert await rows(store, "acme", "other") == [row(), row(tenant_id="other")]


async def test_pending_counts_are_bounded(store: FaultyStore, wall: WallClock) -> None:
    usage = UsageCounter(store, ManualClock(), writer_id="gateway-1-x", now=wall, max_pending=3)
    usage.count(named("acme"), "m", COUNTS)
    usage.count(named("other"), "m", COUNTS)
    usage.count(named("acme"), "m", COUNTS)
    assert (usage.num_pending, usage.num_dropped) == (3, 3)
    assert await usage.flush()
    assert await rows(store, "acme", "other") == [row(times=2)]


async def test_simulated_script_equals_redis(store: FaultyStore) -> None:
    memory = MemoryStore()
    await store.write([("SET", "bad", "text")])
    memory.data["bad"] = b"text"
    for each in (store, memory):
        await each.write([("ZADD", "deleted", 1, "x 1.0")])
    batches: list[tuple[list[str], list[str | int]]] = [
        (["a/b", "bad", "b"], [1, 60, 60, "f", 1, "x 2.0", "f", 2, "y 1.0", "g", 3, "x 2.0"]),
        (["a/b", "bad", "b"], [1, 60, 60, "f", 1, "x 2.0", "f", 2, "y 1.0", "g", 3, "x 2.0"]),
        (["a/b", "b", "b"], [2, 60, 60, "f", 5, "x 2.0", "g", 5, "x 1.0", "h", 7, "x 2.0"]),
    ]
    for keys, arguments in batches:
        keys = ["last", "unsent", "deleted", *keys]
        replies = [await each.evaluate(ADD_UP, keys, arguments) for each in (store, memory)]
        assert replies[0] == replies[1]
    for key in ("last", "unsent", "a/b", "b"):
        assert await store.hash_get(key) == await memory.hash_get(key)
