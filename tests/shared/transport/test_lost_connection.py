from __future__ import annotations

import asyncio

from shared.background import TASK_FAILED
from shared.clock import MonotonicClock
from shared.transport.bus import NatsBus
from shared.transport.lost_connection import AWAY_S, POLL_S, STOPPED_S, LostConnection
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S


def test_connection_that_stops_reading_is_lost_after_seconds() -> None:
    connection = LostConnection()
    num_polls = int(STOPPED_S / POLL_S)
    reasons = [connection.reason(is_connected=True, is_running=False) for _ in range(num_polls)]
    assert reasons[:-1] == [None] * (num_polls - 1)
    assert reasons[-1] == "the connection to NATS has stopped reading"


def test_server_that_is_away_is_waited_for_and_comes_back() -> None:
    connection = LostConnection()
    polls = int(AWAY_S / POLL_S)
    for _ in range(2):
        for _ in range(polls - 1):
            assert connection.reason(is_connected=False, is_running=True) is None
        assert connection.reason(is_connected=True, is_running=True) is None
    for _ in range(polls - 1):
        connection.reason(is_connected=False, is_running=True)
    assert connection.reason(is_connected=False, is_running=True) == (
        "not connected to NATS for 120 s"
    )


class FastClock(MonotonicClock):
    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)


async def test_process_ends_when_the_read_loop_of_its_client_has_ended(
    nats_server: NatsServer,
) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: (
            failed.set_result(context["exception"]) if context["message"] == TASK_FAILED else None
        )
    )
    bus = await NatsBus.connect(nats_server.url("gateway-1"), process_id="gateway-1")
    bus.end_process_when_lost(FastClock())
    await asyncio.sleep(0.05)
    assert not failed.done()
    for task in (bus._client._reading_task, bus._client._ping_interval_task):
        assert task is not None
        task.cancel()
    async with asyncio.timeout(LIMIT_S):
        assert str(await failed) == "the connection to NATS has stopped reading"
    assert bus.is_connected  # as health checks see it
    await bus.close()
