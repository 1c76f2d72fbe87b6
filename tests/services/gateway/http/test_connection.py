"""When a connection is closed because its client does not read, on the virtual clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.http.connection import CHECKS_PER_TIMEOUT, ClientConnection
from tests.support.world.clock import VirtualClock, run

TIMEOUT_S = 30.0


class SlowTransport(asyncio.Transport):
    """`num_waiting`: bytes that the client has not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0
        self.aborted_at: float | None = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SimpleNamespace(setsockopt=lambda *option: None) if name == "socket" else default

    def abort(self) -> None:
        self.aborted_at = VirtualClock().now()


class Client:
    def __init__(self) -> None:
        self.transport = SlowTransport()
        self.num_slow = 0
        self.connection = ClientConnection(self.transport, TIMEOUT_S, self._count)

    def _count(self) -> None:
        self.num_slow += 1

    def write(self, num_bytes: int) -> None:
        self.transport.num_waiting = num_bytes
        self.connection.bytes_wait()

    def take(self, num_bytes: int) -> None:
        self.transport.num_waiting -= num_bytes
        if not self.transport.num_waiting:
            self.connection.bytes_sent()


@pytest.mark.parametrize("takes", [(), (10.0, 35.0)])
def test_connection_ends_after_the_timeout_without_a_byte(takes: tuple[float, ...]) -> None:
    async def main() -> None:
        client = Client()
        client.write(3)
        for at in takes:
            await asyncio.sleep(at - VirtualClock().now())
            client.take(1)
        await asyncio.sleep(2 * TIMEOUT_S)
        ended_at, last_s = client.transport.aborted_at, max(takes, default=0.0)
        assert ended_at is not None
        assert 0 <= ended_at - last_s - TIMEOUT_S <= 2 * TIMEOUT_S / CHECKS_PER_TIMEOUT
        assert client.connection.is_slow and client.num_slow == 1

    run(main())


def test_connection_lives_while_the_client_reads() -> None:
    async def main() -> None:
        client = Client()
        for _ in range(5):
            client.write(2)
            for _ in range(2):
                await asyncio.sleep(0.8 * TIMEOUT_S)
                assert not client.connection._is_empty.is_set()
                client.take(1)
            await client.connection.sent()
            await asyncio.sleep(3 * TIMEOUT_S)  # nothing to read
        assert client.transport.aborted_at is None and client.num_slow == 0

    run(main())


def test_lost_connection_ends_the_wait() -> None:
    async def main() -> None:
        client = Client()
        client.write(1)
        asyncio.get_running_loop().call_later(1.0, client.connection.lost)
        await client.connection.sent()
        assert VirtualClock().now() == 1.0
        await asyncio.sleep(2 * TIMEOUT_S)
        assert client.transport.aborted_at is None

    run(main())
