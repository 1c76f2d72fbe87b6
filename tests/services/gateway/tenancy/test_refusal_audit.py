"""Refusals of all processes in the audit log, once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from services.gateway.tenancy.refusal_audit import COUNTS, RefusalAudit
from shared.clock import MonotonicClock
from shared.messages import Heartbeat
from shared.store import RedisStore
from shared.tenancy import audit
from shared.tenancy.refusals import Refusals
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHDB",)])
    yield store
    await store.close()


def heartbeat(refusals: Refusals, epoch: int = 1) -> Heartbeat:
    return Heartbeat(
        process_id="decode-1",
        epoch=epoch,
        sequence_number=1,
        roles=("decode",),
        state="ready",
        interval_s=0.25,
        region=refusals.region,
        refusals=refusals.last(),
    )


async def lines(store: RedisStore) -> list[tuple[str, int]]:
    found = await audit.newest(store, 100, ["refusal"])
    assert {(each.who, each.outcome) for each in found} <= {("decode-1", "outside_regions")}
    shown = [msgspec.json.decode(each.arguments) for each in found]
    assert all((e["check"], e["own"], e["region"]) == ("decode", "us", "us") for e in shown)
    return sorted((each["tenant"], each["count"]) for each in shown)


async def test_of_two_gateways_one_writes_each_refusal(store: RedisStore) -> None:
    gateways = [RefusalAudit(store, MonotonicClock()) for _ in range(2)]
    refusals = Refusals("us")

    async def beat(epoch: int = 1) -> None:
        for each in gateways:
            each.observe(heartbeat(refusals, epoch))
            await each.flush()

    await beat()
    assert await lines(store) == []
    refusals.count("decode", "acme", "us")
    await beat()
    await beat()
    refusals.count("decode", "acme", "us")
    refusals.count("decode", "acme", "us")
    refusals.count("decode", "other", "us")
    await beat()
    assert await lines(store) == [("acme", 1), ("acme", 2), ("other", 1)]
    gateways.append(RefusalAudit(store, MonotonicClock()))  # it starts, and repeats nothing
    await beat()
    assert len(await lines(store)) == 3
    await beat(epoch=2)  # of a process that has started again, and refused as much
    assert len(await lines(store)) == 5


async def test_a_refusal_waits_for_redis(store: RedisStore) -> None:
    gateway, refusals = RefusalAudit(store, MonotonicClock()), Refusals("us")
    refusals.count("decode", "acme", "us")
    gateway.observe(heartbeat(refusals))
    gateway.observe(heartbeat(refusals))
    assert await lines(store) == []
    await gateway.flush()
    assert await lines(store) == [("acme", 1)]


async def test_redis_remembers_so_many_kinds(store: RedisStore) -> None:
    """A linked site may name a new tenant in each request that is refused."""
    gateway, refusals = RefusalAudit(store, MonotonicClock(), max_counts=4), Refusals("us")
    for number in range(10):
        refusals.count("decode", f"b/tenant-{number}", "us")
        gateway.observe(heartbeat(refusals))
        await gateway.flush()
    assert len(await store.hash_get(COUNTS)) <= 4
    assert await lines(store) == [(f"b/tenant-{number}", 1) for number in range(10)]
