"""The recovery core on a bus: which messages it publishes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import msgspec
import pytest

from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.stream_driver import MAX_SUBMITS_PER_TURN, StreamDriver
from shared.errors import HearthError
from shared.lifecycle.health import TICK_S, Loss
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AbortRequest,
    AckFinished,
    Finish,
    Placed,
    Queued,
    Served,
    SubmitRequest,
    TokenBatch,
    TokenEntry,
)
from shared.subjects import SUBMIT, control, placement, tokens
from tests.services.gateway.streams.test_streams import Recorder, request
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.randomness import SeededRandomness

LENGTH = Finish(reason="length", served=Served(num_cached_tokens=0, prefill_worker_id=None))


class Cluster:
    def __init__(self) -> None:
        network, clock = SimulatedNetwork(), VirtualClock()
        self.gateway, self.scheduler = network.bus("gateway-1"), network.bus("scheduler-1")
        self.worker = network.bus("decode-1")
        health_monitor = HealthMonitor(self.gateway, clock, SeededRandomness(1), roles=("gateway",))
        self.driver = StreamDriver(self.gateway, clock, health_monitor)
        self.acknowledged: list[tuple[bytes, ...]] = []
        self.aborted: list[tuple[bytes, str]] = []

    async def start(self) -> None:
        await self.driver.start()
        queued = Queued(scheduler_id="scheduler-1", num_ahead=0)
        await self.scheduler.serve(SUBMIT, SubmitRequest, lambda _: queued)
        messages = AbortRequest | AckFinished
        await self.worker.subscribe(control("decode", "decode-1"), messages, self._on_control)

    def _on_control(self, message: AbortRequest | AckFinished) -> None:
        if isinstance(message, AbortRequest):
            self.aborted.append((message.placement_id, message.reason))
        else:
            self.acknowledged.append(message.placement_ids)

    async def run_request(self, number: int) -> bytes:
        """Runs one request from submission to end. Returns its placement id."""
        receiver, placement_id = Recorder(), bytes([number]) * 16
        self.driver.open([Opening(request(f"r{number}"), receiver)])
        placed = Placed(request_id=f"r{number}", placement_id=placement_id, worker_id="decode-1")
        await self.scheduler.publish(placement("gateway-1"), placed)
        entry = TokenEntry(placement_id, 0, 0, (7,), LENGTH)
        await self.worker.publish(
            tokens("gateway-1"), TokenBatch(worker_id="decode-1", entries=(entry,))
        )
        await self.driver.idle()
        assert [end.error for end in receiver.ends] == [None]
        return placement_id


def test_requests_of_one_tick_share_an_acknowledgement() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        finished = [await cluster.run_request(number) for number in (1, 2, 3)]
        assert cluster.acknowledged == []
        await asyncio.sleep(2 * TICK_S)
        assert cluster.acknowledged == [tuple(finished)]
        await cluster.driver.stop()

    run(main())


def test_stop_flushes_acknowledgements() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        finished = await cluster.run_request(1)
        await cluster.driver.stop()
        await asyncio.sleep(TICK_S / 2)
        assert cluster.acknowledged == [(finished,)]

    run(main())


def test_placement_on_a_worker_that_has_just_left_is_given_up_at_once() -> None:
    """The worker announced its stop before the scheduler's message arrived."""

    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        cluster.driver.open([Opening(request("r1"), Recorder())])
        cluster.driver._on_lost("decode-1", Loss.STOPPED)
        placed = Placed(request_id="r1", placement_id=b"1" * 16, worker_id="decode-1")
        await cluster.scheduler.publish(placement("gateway-1"), placed)
        await asyncio.sleep(TICK_S)
        assert cluster.aborted == [(b"1" * 16, "superseded")]
        await cluster.driver.stop()

    run(main())


def test_placement_on_a_worker_that_is_silent_here_alone_is_awaited() -> None:
    """The scheduler hears the worker; five placements at once would spend all tries."""

    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        cluster.driver.open([Opening(request("r1"), Recorder())])
        cluster.driver._on_lost("decode-1", Loss.UNRESPONSIVE)
        placed = Placed(request_id="r1", placement_id=b"1" * 16, worker_id="decode-1")
        await cluster.scheduler.publish(placement("gateway-1"), placed)
        await asyncio.sleep(TICK_S)
        assert not cluster.aborted
        await cluster.driver.stop()

    run(main())


async def sent_by_turn(
    cluster: Cluster, num_turns: int, begin: Callable[[], None]
) -> list[list[str]]:
    """Returns the ids of the requests whose submission began in each turn of the loop."""
    sent: list[list[str]] = [[]]
    request_from_scheduler = cluster.driver._request_from_scheduler

    async def record(subject: str, message: SubmitRequest) -> Queued:
        sent[-1].append(message.request.request_id)
        return await request_from_scheduler(subject, message)

    with patch.object(cluster.driver, "_request_from_scheduler", record):
        begin()
        for _ in range(num_turns):
            await asyncio.sleep(0)
            sent.append([])
    return sent


def test_many_requests_are_sent_in_parts_by_turns_of_tenants() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        ids = [f"r{number}" for number in range(256)]
        other = msgspec.structs.replace(request("other"), tenant_id="other")

        def begin() -> None:
            cluster.driver.open([Opening(request(each), Recorder()) for each in ids])
            cluster.driver.open([Opening(other, Recorder())])

        turns = await sent_by_turn(cluster, 40, begin)
        sent = [each for turn in turns for each in turn]
        assert max(map(len, turns)) <= MAX_SUBMITS_PER_TURN
        assert sent.index("other") <= MAX_SUBMITS_PER_TURN + 1
        assert [each for each in sent if each != "other"] == ids
        await cluster.driver.stop()

    run(main())


def close_each(driver: StreamDriver) -> None:
    for number in range(1200):
        driver.close(f"r{number}", "client_gone", HearthError("it has left"))


def close_all(driver: StreamDriver) -> None:
    driver.close_all(HearthError("the gateway stops"))


@pytest.mark.parametrize("close", [close_each, close_all])
def test_request_that_ends_before_its_turn_is_not_sent(
    close: Callable[[StreamDriver], None],
) -> None:
    """Three responses of one tenant: the room that one leaves would open requests of another."""

    async def main() -> None:
        cluster, clients = Cluster(), [Recorder() for _ in range(1200)]
        await cluster.start()
        openings = [Opening(request(f"r{n}"), client) for n, client in enumerate(clients)]

        def begin() -> None:
            for first in range(0, 1200, 400):
                cluster.driver.open(openings[first : first + 400])
            close(cluster.driver)

        turns = await sent_by_turn(cluster, 40, begin)
        assert sum(map(len, turns)) <= MAX_SUBMITS_PER_TURN
        assert not len(cluster.driver) and all(each.error is not None for each in clients)
        await cluster.driver.stop()

    run(main())


def test_stopped_driver_sends_no_more_requests() -> None:
    async def main() -> None:
        cluster, stops = Cluster(), set[asyncio.Task[None]]()
        await cluster.start()

        def begin() -> None:
            ids = [f"r{number}" for number in range(256)]
            cluster.driver.open([Opening(request(each), Recorder()) for each in ids])
            stops.add(asyncio.create_task(cluster.driver.stop()))

        turns = await sent_by_turn(cluster, 40, begin)
        assert 0 < sum(map(len, turns)) <= 2 * MAX_SUBMITS_PER_TURN
        await asyncio.gather(*stops)

    run(main())
