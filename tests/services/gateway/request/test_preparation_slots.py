"""Slots of one tenant's requests in preparation."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.request.preparation_slots import (
    ALONE_AFTER_S,
    PreparationSlots,
    RecentTenants,
)
from shared.clock import Clock, MonotonicClock
from shared.errors import Overloaded
from tests.shared.test_store import ManualClock


def slots_of(
    per_tenant: int,
    *,
    max_waiting: int = 9,
    max_wait_s: float = 9.0,
    clock: Clock | None = None,
    alone: int | None = None,
) -> PreparationSlots:
    recent = RecentTenants(MonotonicClock() if clock is None else clock)
    return PreparationSlots(
        per_tenant, recent, alone=alone, max_waiting=max_waiting, max_wait_s=max_wait_s
    )


async def test_tenant_without_others_has_more_slots() -> None:
    clock = ManualClock()
    slots = slots_of(1, clock=clock, alone=3)
    begun: list[str] = []
    ends: dict[int, asyncio.Event] = {}

    async def hold(tenant_id: str, number: int) -> None:
        async with slots.slot(tenant_id):
            begun.append(f"{tenant_id}{number}")
            await ends.setdefault(number, asyncio.Event()).wait()

    async def begun_now() -> list[str]:
        for _ in range(4):
            await asyncio.sleep(0)
        found, begun[:] = [*begun], []
        return found

    tasks = [asyncio.create_task(hold("a", number)) for number in range(9)]
    assert await begun_now() == ["a0", "a1", "a2"]
    tasks.append(asyncio.create_task(hold("b", 9)))
    assert await begun_now() == ["b9"]
    for number, expected in ((0, []), (1, []), (2, ["a3"]), (9, [])):  # one slot beside another
        ends[number].set()
        assert await begun_now() == expected
    clock.at += ALONE_AFTER_S
    ends[3].set()
    assert await begun_now() == ["a4", "a5", "a6"]
    for number in range(4, 9):
        ends.setdefault(number, asyncio.Event()).set()
    await asyncio.gather(*tasks)
    assert not slots._tenants


async def prepare(slots: PreparationSlots, tenant_id: str, name: str, log: list[str]) -> None:
    async with slots.slot(tenant_id):
        log.append(name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_third_request_waits_and_another_tenant_does_not() -> None:
    slots, log = slots_of(2), list[str]()
    named = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1")]
    await asyncio.gather(*[prepare(slots, tenant, name, log) for tenant, name in named])
    assert log == ["a1", "a2", "b1", "a3", "a4"]
    assert not slots._tenants


async def test_full_queue_rejects_this_tenant_alone() -> None:
    slots = slots_of(1, max_waiting=1)
    async with slots.slot("a"):
        waiting = asyncio.create_task(prepare(slots, "a", "a2", []))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="this tenant"):
            await prepare(slots, "a", "a3", [])
        await prepare(slots, "b", "b1", [])
    await waiting


async def test_slot_is_not_lost_by_those_that_stop_waiting() -> None:
    slots = slots_of(1, max_wait_s=0.001)
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
    slots = slots_of(1)
    async with slots.slot("a"):
        cancelled = asyncio.create_task(prepare(slots, "a", "cancelled", []))
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not slots._tenants
