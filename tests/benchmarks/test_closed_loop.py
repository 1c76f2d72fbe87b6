"""The client of `benchmarks/control_plane.py` counts events right, however they are cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.serving.closed_loop import Target, num_events_of
from services.client.http_client import CountingConnection

EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\ndata: [DONE]\n\n',
]
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS)
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS + b"0\r\n\r\n"


class Transport(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        pass


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 50, len(ANSWER)])
async def test_events_are_counted_however_they_are_cut(num_bytes: int) -> None:
    connection = CountingConnection(has_quickack=False)
    connection.connection_made(Transport())
    asking = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    for start in range(0, len(ANSWER), num_bytes):
        assert not asking.done()
        connection.data_received(ANSWER[start : start + num_bytes])
    count = await asking
    assert count.num_events == 4
    assert count.first_text_at >= count.started > 0


async def test_who_parses_finds_what_is_no_json() -> None:
    connection = CountingConnection(has_quickack=False, parses=True)
    connection.connection_made(Transport())
    asking = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="Expecting"):
        connection.data_received(ANSWER.replace(b'"a"', b"[a]"))
    connection.data_received(ANSWER)
    await asking


async def test_a_connection_that_ends_early_is_no_answer() -> None:
    connection = CountingConnection(has_quickack=False)
    connection.connection_made(Transport())
    asking = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    connection.data_received(ANSWER[:-1])
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await asking


@pytest.mark.parametrize(("num_tokens", "is_told"), [(2, True), (3, False)])
async def test_each_token_must_be_an_event(num_tokens: int, is_told: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        target = Target(f"http://{host}:{port}", "key", "model")
        if is_told:
            assert await num_events_of(target, "?", num_tokens) == 4
        else:
            with pytest.raises(ValueError, match="2 events with text for 3 tokens"):
                await num_events_of(target, "?", num_tokens)
