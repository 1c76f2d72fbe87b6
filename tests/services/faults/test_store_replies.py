"""Replies of Redis that no script returns, and errors in handling one: every loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest

from services.gateway.receipts.places import Places
from services.gateway.receipts.receipts import SWEEP_S, Receipts
from services.gateway.tenancy.limits import RENEW_S, Limits
from services.gateway.tenancy.redis_memory import RedisMemory
from services.gateway.tenancy.request_cost import RequestCost
from services.gateway.tenancy.usage_counter import FLUSH_S, RUNNING_S, UsageCounter
from shared.background import Background, num_failed_items
from shared.config import GatewayConfig
from shared.randomness import SystemRandomness
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant import TenantRecord
from tests.services.faults.test_item_faults import ERRORS
from tests.services.kv_index.rig import Rig
from tests.services.kv_index.test_pin_keeper import new_prefix
from tests.services.kv_index.test_pin_keeper import scenario as pin_scenario
from tests.services.kv_index.test_registry import registry_on, store_run
from tests.support.world.clock import VirtualClock, run
from tests.support.world.store import MemoryStore

RECORD = TenantRecord(tenant_id="acme", concurrency=9, requests_per_min=99)
REPLIES = (None, 7, "text", b"many 7 -1", b"\xff", [], [1], [[9, b"reason"]], [[0, 1]], {1: 2})


class OddStore(MemoryStore):
    """Gives the next one of the replies to each script, then that of the script."""

    def __init__(self, replies: Sequence[object]) -> None:
        super().__init__()
        self.replies = list(replies)

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        reply = await super().evaluate(script, keys, arguments)
        return self.replies.pop(0) if self.replies else reply


def living(test: Callable[[], Awaitable[None]]) -> None:
    """Fails if an exception would have ended the process."""
    reported: list[object] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: reported.append(context)
        )
        await test()

    run(watched())
    assert reported == []


def test_limits_outlive_any_reply() -> None:
    async def test() -> None:
        store = OddStore(REPLIES)
        limits = Limits(store, VirtualClock())
        limits.start()
        for number in range(4):
            lease = await limits.admit(RECORD, f"r{number}", RequestCost(1, 1))
            if number:
                limits.settle(lease, 1)
            await asyncio.sleep(2 * RENEW_S)
        assert not store.replies and limits.num_unsettled == 0
        await limits.stop()

    living(test)


def test_usage_outlives_any_reply() -> None:
    async def test() -> None:
        store = OddStore(REPLIES)
        usage = UsageCounter(store, VirtualClock(), writer_id="g", now=lambda: 0.0)
        usage.start()
        for _ in range(3 * len(REPLIES)):
            usage.count(RECORD, "m", {"requests": 1})
            await asyncio.sleep(FLUSH_S)
        await asyncio.sleep(RUNNING_S)
        assert not store.replies and usage.num_pending == 0
        fields = store.data["hearth:acme:usage:1970-01-01"]
        assert fields[b"requests:m"] == str(3 * len(REPLIES)).encode()
        await usage.stop()

    living(test)


@pytest.mark.parametrize("error", ERRORS)
def test_error_in_a_round_of_a_loop_is_counted_and_ends_nothing(error: BaseException) -> None:
    async def test() -> None:
        store, clock, before = OddStore(()), VirtualClock(), num_failed_items()
        limits = Limits(store, clock)
        usage = UsageCounter(store, clock, writer_id="g", now=lambda: 0.0)
        lease = await limits.admit(RECORD, "a", RequestCost(1, 1))
        await limits.admit(RECORD, "b", RequestCost(1, 1))
        limits.settle(lease, 1)
        usage.count(RECORD, "m", {"requests": 1})
        with patch.object(store, "evaluate", side_effect=error):
            limits.start()
            usage.start(Mock(side_effect=error))
            await asyncio.sleep(RENEW_S + RUNNING_S)
            assert limits.num_unsettled == usage.num_pending == 1
        assert num_failed_items() - before > 4
        await asyncio.sleep(RENEW_S)
        assert limits.num_unsettled == usage.num_pending == 0
        await limits.stop()
        await usage.stop()

    living(test)


def test_memory_of_redis_is_unknown_after_an_odd_reply() -> None:
    async def test() -> None:
        store, tasks = AsyncMock(), Background()
        store.evaluate.side_effect = [*REPLIES[:3], b"maxmemory:8\nused_memory:4", 1, 2]
        memory = RedisMemory(store, VirtualClock())
        tasks.start_own(memory.run())
        await asyncio.sleep(17)
        assert memory.use == (4, 8)
        await asyncio.sleep(5)
        assert memory.use is None
        await tasks.stop()

    living(test)


def test_record_that_cannot_be_read_holds_up_no_other_tenant() -> None:
    async def test() -> None:
        store = MemoryStore()
        registry = registry_on(store, max_per_tenant=1)
        await store.write([("ZADD", "hearth:t:prefixes", 1, b"\xff\xfe")])
        for tenant in ("t", "u"):
            for number in (1, 2):
                store_run(registry, number, tenant=tenant)
        await registry.flush()
        await registry.trim()
        await registry.trim()
        assert [len(store.data[f"hearth:{each}:prefixes"]) for each in ("t", "u")] == [1, 1]

    living(test)


@pytest.mark.parametrize("error", ERRORS)
def test_tenant_whose_prefixes_cannot_be_read_holds_up_no_other(error: BaseException) -> None:
    async def test(rig: Rig) -> None:
        keeper, read = rig.service._keeper, rig.service._keeper._read

        async def fail_one(tenant_id: str, now: float) -> None:
            if tenant_id == "a":
                raise error
            await read(tenant_id, now)

        with patch.object(keeper, "_read", fail_one):
            for tenant_id in ("a", "b"):
                await pinned_prefix.save(rig.store, new_prefix(tenant_id=tenant_id), 1_000.0)
            await asyncio.sleep(2.5)
            assert len(keeper.pins) == 1
        await pinned_prefix.record_change(rig.store, "b")
        await asyncio.sleep(2.5)
        assert len(keeper.pins) == 2

    pin_scenario(test)


def test_sweep_of_receipts_goes_on_after_a_store_that_raises() -> None:
    async def test() -> None:
        config = GatewayConfig(
            nats_url="nats://g:p@h",
            process_id="g",
            redis_url="redis://h",
            cluster_secret="secret",
            receipt_ttl_s=3600.0,
        )
        places = Places("g", "", "", lambda site: "")
        receipts = Receipts(config, places, VirtualClock(), lambda: 0.0, SystemRandomness())
        tasks, swept = Background(), Mock()
        with (
            patch.object(receipts._standard, "expire", side_effect=KeyError("r")),
            patch.object(receipts._zero, "expire", swept),
        ):
            tasks.start_own(receipts.run())
            await asyncio.sleep(2.5 * SWEEP_S)
        assert swept.call_count == 2
        await tasks.stop()

    living(test)
