"""A subset of the matrix on one cluster: invariants that hold at any machine speed. The tests after
it kill a gateway, those in `tests/end_to_end` workers of a model.

`scripts/chaos`, which has the machine to itself, checks times against their bars.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant import usage_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.chaos.chaos import Chaos
from tests.chaos.checks.phases import Phase
from tests.chaos.restarts import restart_each
from tests.chaos.rows import Fault, run_row
from tests.chaos.world.load import leave_early
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S = 3.0 + 1.0  # of a gateway's placements, after its loss is detected
SLACK_S = LIMIT_S / 2  # of a busy machine; the requests would have run for a minute
DAY_S = 86_400.0
PAST_DAY = "2026-01-01"
LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}


def repeated(*row: str) -> Any:
    return pytest.param(*row, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("fault", "victim", "phase"),
    [
        ("freeze", "decode-1", "decoding"),
        ("device", "prefill-1", "transferring"),
        repeated("kill", "decode-1", "decoding"),
        repeated("kill", "prefill-1", "transferring"),
        repeated("freeze", "scheduler-1", "placed"),
        repeated("kill", "nats-server", "finishing"),
        repeated("freeze", "redis-server", "placed"),
        repeated("device", "decode-1", "decoding"),
        repeated("drain", "decode-1", "decoding"),
        repeated("drain", "prefill-1", "transferring"),
    ],
)
async def test_responses_equal_the_undisturbed_run(
    chaos: Chaos, fault: Fault, victim: str, phase: Phase
) -> None:
    row = await run_row(chaos, fault, victim, phase)
    assert (row.lost, row.altered) == (0, 0), row
    assert row.whole_after_s is not None, row
    assert row.moved > 0, row
    assert row.unmoved == [], row
    if victim.startswith("decode"):
        assert row.resubmitted > 0, row
        assert row.detect_s is not None or fault in ("device", "drain")
    if fault == "device":
        assert "device_lost" in chaos.cluster.log_of(victim)


@pytest.mark.long  # one without load: tests/services/cli/cluster/test_up.py
async def test_killed_redis_returns_with_all_tenants(chaos: Chaos) -> None:
    """Their limits and usage, and keys that no gateway has cached."""
    limits = {"acme": {"requests_per_min": 60}, "other": {"concurrency": 9}}
    async with _tenants(chaos) as (store, admin):
        for name, changes in limits.items():
            await admin.add(name, changes, f"key-of-{name}")
            await store.write([("HSET", usage_of(name, PAST_DAY), "requests:m", 7)])
        records, usage = await admin.all(), await admin.usage([*limits], [PAST_DAY])
        counted = await _num_requests(admin)
    assert sorted(records) == ["acme", "chaos", "other"]
    row = await run_row(chaos, "kill", "redis-server", "placed")
    assert (row.lost, row.altered) == (0, 0), row
    async with _tenants(chaos) as (_, admin):
        assert await admin.all() == records
        assert await admin.usage([*limits], [PAST_DAY]) == usage
        await until(lambda: _is_counted(admin, counted + row.streams), poll_s=0.05)
        assert await _num_requests(admin) == counted + row.streams
    path, body = chaos.requests[0]
    for gateway, url in chaos.cluster.urls.items():
        for name in limits:
            exchange = Exchange(body, gateway)
            await run_exchange(exchange, url, f"key-of-{name}", path)
            assert exchange.is_successful, exchange


@contextlib.asynccontextmanager
async def _tenants(chaos: Chaos) -> AsyncIterator[tuple[RedisStore, TenantAdmin]]:
    store = RedisStore(chaos.cluster.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    try:
        yield store, TenantAdmin(store, time.time)
    finally:
        await store.close()


async def _is_counted(admin: TenantAdmin, num_requests: int) -> bool:
    return await _num_requests(admin) >= num_requests


async def _num_requests(admin: TenantAdmin) -> int:
    """The counted requests of the load's tenant, on either side of midnight."""
    now = time.time()
    rows = await admin.usage(["chaos"], [day_of(now - DAY_S), day_of(now), day_of(now + DAY_S)])
    return sum(each.requests for each in rows)


async def test_disconnected_clients_leave_nothing_behind(chaos: Chaos) -> None:
    await leave_early(chaos, 100)
    await chaos.wait_until_empty()
    assert await chaos.leftovers() == {}


async def test_requests_of_a_dead_gateway_are_dropped(chaos: Chaos) -> None:
    """Its clients get a broken connection; its workers must stop computing their requests."""
    cluster = chaos.cluster
    exchanges = [_long(chaos, "gateway-1", f"orphan {number}") for number in range(4)]
    tasks = [asyncio.create_task(each) for each, _ in exchanges]
    await asyncio.gather(*(exchange.first_event.wait() for _, exchange in exchanges))
    cluster.kill("gateway-1")
    killed_at = time.monotonic()
    await asyncio.gather(*tasks)
    assert all(exchange.is_broken for _, exchange in exchanges)
    await chaos.wait_until_empty(timeout_s=LEASE_S + SLACK_S)
    assert time.monotonic() - killed_at > 1.0  # the requests would have run longer than that
    await cluster.restart("gateway-1")
    await cluster.wait_until_ready()


async def test_second_sigterm_forces_exit_and_stream_continues(chaos: Chaos) -> None:
    cluster = chaos.cluster
    sending, exchange = _long(chaos, "gateway-1", "forced", max_tokens=120)
    task = asyncio.create_task(sending)
    await exchange.first_event.wait()
    victim = await chaos.monitor.wait(_running_decode(chaos))
    cluster.terminate(victim)
    await chaos.monitor.wait(lambda: chaos.monitor.newest[victim].state == "draining")
    cluster.terminate(victim)
    assert await cluster.ended(victim, 5.0) == 1
    await task
    assert exchange.is_successful, exchange
    assert exchange.metadata["num_resubmissions"] == 1
    await cluster.restart(victim)
    await cluster.wait_until_ready()


async def test_rolling_restart_fails_no_request(chaos: Chaos) -> None:
    """A gateway's: tests/services/gateway/test_rolling_restart.py."""
    names = ["scheduler-1", "prefill-1", "decode-1"]
    restarts, load = await restart_each(chaos, names, num_clients=6)
    assert [each.exit_status for each in restarts] == [0] * len(names), restarts
    assert load.num_requests > len(names)
    assert load.failed == []
    assert load.num_resubmitted == 0  # a draining process finishes its work
    await chaos.wait_until_empty()


def _long(
    chaos: Chaos, gateway: str, salt: str, **options: object
) -> tuple[Coroutine[Any, Any, Exchange], Exchange]:
    """A long stream and the exchange that records it."""
    body = {**chaos.requests[0][1], **LONG, "cache_salt": salt, **options}
    exchange = Exchange(body, gateway)
    url, path = chaos.cluster.urls[gateway], chaos.requests[0][0]
    return run_exchange(exchange, url, chaos.cluster.api_key, path), exchange


def _running_decode(chaos: Chaos) -> Callable[[], str | None]:
    """Returns a function that finds a decode worker with running requests, or None."""

    def found() -> str | None:
        newest = chaos.monitor.newest
        busy = (n for n in chaos.cluster.named("decode") if newest[n].load.num_running)
        return next(busy, None)

    return found
