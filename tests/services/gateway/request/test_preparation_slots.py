"""Slots of one tenant's requests in preparation."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.request.preparation_slots import PreparationSlots
from shared.errors import Overloaded


async def prepare(slots: PreparationSlots, tenant_id: str, name: str, log: list[str]) -> None:
    async with slots.slot(tenant_id):
        log.append(name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_third_request_waits_and_another_tenant_does_not() -> None:
    slots, log = PreparationSlots(2), list[str]()
    named = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1")]
    await asyncio.gather(*[prepare(slots, tenant, name, log) for tenant, name in named])
    assert log == ["a1", "a2", "b1", "a3", "a4"]
    assert not slots._tenants


async def test_full_queue_rejects_this_tenant_alone() -> None:
    slots = PreparationSlots(1, max_waiting=1)
    async with slots.slot("a"):
        waiting = asyncio.create_task(prepare(slots, "a", "a2", []))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="this tenant"):
            await prepare(slots, "a", "a3", [])
        await prepare(slots, "b", "b1", [])
    await waiting


async def test_slot_is_not_lost_by_those_that_stop_waiting() -> None:
    slots = PreparationSlots(1, max_wait_s=0.001)
    async with slots.slot("a"):
        with pytest.raises(Overloaded):
            await prepare(slots, "a", "late", [])
        cancelled = asyncio.create_task(prepare(slots, "a", "cancelled", []))
        await asyncio.sleep(0)
        cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await prepare(slots, "a", "next", [])
    assert not slots._tenants


async def test_slot_that_comes_with_the_cancellation_is_released() -> None:
    slots = PreparationSlots(1)
    async with slots.slot("a"):
        cancelled = asyncio.create_task(prepare(slots, "a", "cancelled", []))
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not slots._tenants
