"""A client that sends much cannot hold the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from services.gateway.http import server
from services.gateway.http.server import WebServer
from tests.support.waiting import LIMIT_S

NUM_BYTES = 8 << 20
READ_BYTES = 256 << 10  # uvloop's and asyncio's read buffers
HEAD = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {NUM_BYTES}\r\n\r\n".encode()


async def most_bytes_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of one connection whose request was rejected before its body was read."""
    num_bytes = most = received = 0
    data_received = server._Http.data_received

    def counted(self: Any, data: bytes) -> None:
        nonlocal num_bytes, most, received
        num_bytes += len(data)
        received += len(data)
        most = max(most, num_bytes)
        data_received(self, data)

    monkeypatch.setattr(server._Http, "data_received", counted)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    web = WebServer(app, "127.0.0.1", 0)  # type: ignore[arg-type]
    await web.start()
    _, writer = await asyncio.open_connection(*web.address)
    writer.write(HEAD + bytes(NUM_BYTES))
    async with asyncio.timeout(LIMIT_S):
        while received < len(HEAD) + NUM_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    writer.close()
    await web.stop()
    return most


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_turn_of_the_loop_reads_a_connection_once(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(most_bytes_in_a_turn(monkeypatch)) <= READ_BYTES
