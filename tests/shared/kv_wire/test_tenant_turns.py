"""Frames of many pushes of one tenant do not delay those of another."""

from __future__ import annotations

import asyncio

import pytest

from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import Fill
from shared.kv_wire.push_link import TenantTurns
from shared.messages import DataPlaneAddress
from tests.shared.kv_wire.support import DEADLINE_S, RecordingSink, eventually, header


class Held:
    """Records who held the turns, in order; `cancelled` callers leave while they wait."""

    def __init__(self) -> None:
        self.turns = TenantTurns()
        self.order: list[str] = []
        self.gate = asyncio.Event()

    async def hold(self, tenant_id: str, number: int) -> None:
        async with self.turns.turn(tenant_id):
            self.order.append(f"{tenant_id}{number}")
            await self.gate.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def started(held: Held, callers: str) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(held.hold(tenant_id, number))
        for number, tenant_id in enumerate(callers)
    ]


@pytest.mark.parametrize(
    ("callers", "order"),
    [
        ("aaa", "a0 a1 a2"),
        ("aaaab", "a0 a1 b4 a2 a3"),
        ("aabbcc", "a0 a1 b2 c4 b3 c5"),
        ("aaaabbc", "a0 a1 b4 c6 a2 b5 a3"),
    ],
)
async def test_waiting_tenants_take_turns(callers: str, order: str) -> None:
    held = Held()
    tasks = started(held, callers)
    await settle()
    held.gate.set()
    await asyncio.gather(*tasks)
    assert " ".join(held.order) == order


@pytest.mark.parametrize("cancelled", [(0,), (1,), (2, 3), (0, 1), (1, 2, 3, 4)])
async def test_cancelled_callers_are_skipped(cancelled: tuple[int, ...]) -> None:
    held = Held()
    tasks = started(held, "aabab")
    await settle()
    for number in cancelled:
        tasks[number].cancel()
    held.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks, return_exceptions=True)
        await held.hold("c", 9)  # nobody holds it any more
    left = {f"{tenant_id}{number}" for number, tenant_id in enumerate("aabab")}
    left -= {f"{'aabab'[number]}{number}" for number in cancelled if number > 0}
    assert sorted(held.order) == sorted([*left, "c9"])


async def test_caller_that_is_cancelled_at_its_turn_passes_it_on() -> None:
    held = Held()
    tasks = started(held, "aab")
    await settle()
    tasks[0].cancel()  # gives the turn to the second one, which does not run before the next line
    asyncio.get_running_loop().call_soon(tasks[1].cancel)
    held.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks, return_exceptions=True)
        await held.hold("c", 9)
    assert held.order[-2:] == ["b2", "c9"]


async def test_frame_of_another_tenant_passes_those_that_wait(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    filled: list[str] = []

    def fill_of(tenant_id: str) -> Fill:
        async def fill(view: memoryview) -> None:
            filled.append(tenant_id)

        return fill

    gate = asyncio.Event()
    sink = RecordingSink(gate)
    server.expect(b"placement-a", sink)
    link = await dialer.link(address)
    tenants = ["a"] * 20 + ["b"]
    sends = [
        asyncio.ensure_future(link.send(header(1000), fill_of(each), each)) for each in tenants
    ]
    async with asyncio.timeout(DEADLINE_S):
        await sink.entered.wait()
        await eventually(lambda: link.num_unacked == len(filled) > 0)
        num_sent = len(filled)
        gate.set()
        await asyncio.gather(*sends)
    assert filled.index("b") <= num_sent + 1  # one of "a" waits for a slot already
    assert filled.count("a") == 20
