"""The simulation's own seams behave like the real ones."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from shared.errors import NoResponders, Overloaded, PayloadTooLarge, RequestTimeout
from shared.messages import AbortRequest, Done, ListBlocks
from shared.store import BREAKER_S, MAX_STORE_TIMEOUT_S, STORE_TIMEOUT_S, StoreUnavailable
from tests.support.world.bus import SimulatedNetwork, matches
from tests.support.world.clock import VirtualClock, run
from tests.support.world.process import SimulatedProcess
from tests.support.world.store import MemoryStore, ProcessStore

ABORT = AbortRequest(placement_id=b"p" * 16, reason="stop")


def test_virtual_time_jumps_and_timers_stay_ordered() -> None:
    async def scenario() -> list[tuple[float, str]]:
        clock, seen = VirtualClock(), []

        async def record(delay_s: float, name: str) -> None:
            await clock.sleep(delay_s)
            seen.append((clock.now(), name))

        await asyncio.gather(record(3000.0, "late"), record(0.5, "soon"), record(0.0, "now"))
        return seen

    assert run(scenario()) == [(0.0, "now"), (0.5, "soon"), (3000.0, "late")]


def test_endless_run_raises_timeout_error() -> None:
    async def forever() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        run(forever(), limit_s=100)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.b", "a.c", False),
    ],
)
def test_subject_patterns(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


def test_request_outcomes_equal_those_of_nats() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(max_payload_bytes=1000)
        client, server = network.bus("client"), network.bus("server")

        async def handler(message: ListBlocks) -> Done:
            if message.cursor:
                raise Overloaded("full", retry_after_s=float(message.cursor))
            return Done()

        with pytest.raises(NoResponders):
            await client.request("s", ListBlocks(), Done, timeout_s=1)
        unsubscribe = await server.serve("s", ListBlocks, handler)
        assert await client.request("s", ListBlocks(), Done, timeout_s=1) == Done()
        with pytest.raises(Overloaded) as raised:
            await client.request("s", ListBlocks(cursor=3), Done, timeout_s=1)
        assert raised.value.retry_after_s == 3.0
        with pytest.raises(PayloadTooLarge):
            await client.publish("s", AbortRequest(placement_id=bytes(1001), reason="stop"))
        network.freeze("server")
        began = VirtualClock().now()
        with pytest.raises(RequestTimeout):
            await client.request("s", ListBlocks(), Done, timeout_s=0.5)
        assert VirtualClock().now() - began == pytest.approx(0.5)
        network.thaw("server")
        await unsubscribe()
        with pytest.raises(NoResponders):
            await client.request("s", ListBlocks(), Done, timeout_s=1)

    run(scenario())


def test_thawed_process_receives_and_sends_its_backlog() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork()
        one, two, received = network.bus("one"), network.bus("two"), list[bytes]()
        await two.subscribe(
            "s", AbortRequest, lambda message: received.append(message.placement_id)
        )
        network.freeze("two")
        for number in range(5):
            await one.publish("s", AbortRequest(placement_id=bytes([number]) * 16, reason="stop"))
        await asyncio.sleep(1)
        assert received == []
        network.thaw("two")
        assert received == [bytes([number]) * 16 for number in range(5)]
        network.freeze("one")
        await one.publish("s", ABORT)
        await asyncio.sleep(1)
        assert len(received) == 5
        network.thaw("one")
        await asyncio.sleep(1)
        assert len(received) == 6

    run(scenario())


def test_hanging_store_behaves_like_stopped_redis() -> None:
    """Callers time out as with real Redis; pending commands are executed later."""

    async def scenario() -> None:
        shared, clock = MemoryStore(), VirtualClock()
        store = ProcessStore(shared, SimulatedProcess("asker"))
        shared.hang()
        began = clock.now()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.write([("SET", "sent", 1)])
        assert clock.now() - began == pytest.approx(MAX_STORE_TIMEOUT_S, abs=0.001)
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.write([("SET", "unsent", 1)])
        await clock.sleep(BREAKER_S)
        late = asyncio.ensure_future(store.get("sent"))
        await clock.sleep(STORE_TIMEOUT_S / 2)
        assert shared.data == {}
        shared.resume()
        assert await late == b"1"
        assert shared.data.keys() == {"sent"}

    run(scenario())


def test_two_runs_are_equal() -> None:
    async def scenario() -> tuple[list[str], list[tuple[float, str, str]]]:
        network, receivers = SimulatedNetwork(seed=3), list[str]()

        def record(name: str, message: AbortRequest) -> None:
            receivers.append(name)

        for name in ("a", "b", "c"):
            bus = network.bus(name)
            await bus.subscribe("s", AbortRequest, partial(record, name), queue="group")
        client = network.bus("client")
        for _ in range(50):
            await client.publish("s", ABORT)
            await asyncio.sleep(0.1)
        return receivers, network.log

    first, second = run(scenario()), run(scenario())
    assert first == second
    assert set(first[0]) == {"a", "b", "c"}
    assert len(first[0]) == 50
