"""Clients that send in time are not slow because the server was: it reads first, then judges."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from services.gateway.http.connections import Connections
from services.gateway.http.protocol.read_deadline import LOOK_S, ReadDeadline
from services.gateway.http.server import WebServer
from tests.services.gateway.http.test_server import GET, OK, app
from tests.support.waiting import LIMIT_S, until

DELAY_S = 0.05


@pytest.mark.parametrize("limit", ["grace", "head"])
async def test_request_that_arrives_while_the_server_is_busy_is_answered(limit: str) -> None:
    """It is busy between the poll of its sockets and the timers that are due then."""
    late = socket.socket()

    def tenant_of(headers: Any) -> str:
        if dict(headers).get(b"tenant") == b"busy":
            late.sendall(GET)
            time.sleep(2 * DELAY_S)
        return "one"

    connections = Connections(max_without_key=0, grace_s=DELAY_S if limit == "grace" else 60.0)
    head_s = DELAY_S if limit == "head" else 60.0
    server = WebServer(
        app, "127.0.0.1", 0, connections=connections, tenant_of=tenant_of, head_timeout_s=head_s
    )
    await server.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            state = server._server.server_state
            _, busy = await asyncio.open_connection(*server.address)
            late.connect(server.address)
            late.setblocking(False)
            busy.write(GET.replace(b"\r\n\r\n", b"\r\ntenant: busy\r\n\r\n"))
            await until(lambda: len(state.connections) == 2, poll_s=0.0)
            answer = await asyncio.get_running_loop().sock_recv(late, 1000)
            assert answer.startswith(OK)
            busy.close()
    finally:
        late.close()
        await server.stop()


class Loop:
    """The part of a loop that a deadline uses; `run_until` runs one timer, however late."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Loop:
        self.timer = (self.now + delay_s, callback)
        return self

    def cancel(self) -> None:
        self.timer = None

    def run_until(self, now: float) -> None:
        assert self.timer is not None and now >= self.timer[0]
        self.now, callback, self.timer = now, self.timer[1], None
        callback()


@pytest.mark.parametrize(
    ("due_at", "ends_at"),
    [(110.0, 110.0 + LOOK_S), (113.0, 116.0), (500.0, 510.0)],
    ids=["in time", "late", "long stopped"],
)
def test_time_that_the_loop_was_late_is_the_client_s(due_at: float, ends_at: float) -> None:
    loop, ended = Loop(), []
    deadline = ReadDeadline(cast(Any, loop))
    deadline.start(10.0, lambda: ended.append(loop.now))
    loop.run_until(due_at)
    assert not ended
    loop.run_until(ends_at)
    assert ended == [ends_at] and loop.timer is None


@pytest.mark.parametrize("is_looking_again", [False, True])
def test_stopped_deadline_does_not_end(is_looking_again: bool) -> None:
    loop = Loop()
    deadline = ReadDeadline(cast(Any, loop))
    deadline.start(1.0, pytest.fail)
    if is_looking_again:
        loop.run_until(101.0)
    deadline.stop()
    assert loop.timer is None
