"""The client of `benchmarks/control_plane.py` counts the events of a response."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.serving.closed_loop import Target, num_events_of
from benchmarks.serving.counting_connection import CountingConnection

EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\ndata: [DONE]\n\n',
]
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS)
RESPONSE = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS + b"0\r\n\r\n"


class Transport(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        pass


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 50, len(RESPONSE)])
async def test_events_are_counted_for_any_chunk_size(num_bytes: int) -> None:
    connection = CountingConnection(has_quickack=False)
    connection.connection_made(Transport())
    counting = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    for start in range(0, len(RESPONSE), num_bytes):
        assert not counting.done()
        connection.data_received(RESPONSE[start : start + num_bytes])
    count = await counting
    assert count.num_events == 4
    assert count.first_text_at >= count.started > 0


async def test_parsing_client_rejects_invalid_json() -> None:
    connection = CountingConnection(has_quickack=False, parses=True)
    connection.connection_made(Transport())
    counting = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    invalid = RESPONSE.replace(b'"a"', b"[a]")
    seam = invalid.index(b"[a]")  # an event may arrive in parts
    connection.data_received(invalid[:seam])
    with pytest.raises(ValueError, match="Expecting"):
        connection.data_received(invalid[seam:])
    connection.data_received(RESPONSE)
    await counting


async def test_truncated_response_raises_connection_error() -> None:
    connection = CountingConnection(has_quickack=False)
    connection.connection_made(Transport())
    counting = asyncio.create_task(connection.request(b"GET"))
    await asyncio.sleep(0)
    connection.data_received(RESPONSE[:-1])
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await counting


@pytest.mark.parametrize(("num_tokens", "is_valid"), [(2, True), (3, False)])
async def test_every_token_must_have_one_event(num_tokens: int, is_valid: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(RESPONSE)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        target = Target(f"http://{host}:{port}", "key", "model")
        if is_valid:
            assert await num_events_of(target, "?", num_tokens) == 4
        else:
            with pytest.raises(ValueError, match="2 events with text for 3 tokens"):
                await num_events_of(target, "?", num_tokens)


@pytest.mark.parametrize("num_bytes", [1, 3, 50, 1000])
async def test_events_are_counted_over_nats_for_any_size_of_data(num_bytes: int) -> None:
    """The server's INFO and PING come before the messages, of which the last one has no event."""
    sent = [b'INFO {"headers":true}\r\nPING\r\n']
    for text in (b"a", b"b"):
        event = b'{"choices":[{"delta":{"content":"%b"}}]}\n' % text
        sent.append(b"MSG inbox 1 %d\r\n%b\r\n" % (len(event), event))
    sent.append(b"HMSG inbox 1 31 31\r\nNATS/1.0\r\nHearth-End: done\r\n\r\n\r\n")
    received = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"PUB "))
        response = b"".join(sent)
        for start in range(0, len(response), num_bytes):
            writer.write(response[start : start + num_bytes])
            await asyncio.sleep(0)
        received.append(await reader.readuntil(b"PONG\r\n"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        url = f"nats://client-1:secret@{host}:{port}"
        target = Target("", "", "model", nats_url=url, is_nats=True)
        assert await num_events_of(target, "?", 2) == 2
    assert b'"user":"client-1","pass":"secret"' in received[0]
