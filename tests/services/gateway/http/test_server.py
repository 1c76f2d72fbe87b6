"""Clients that take their time: a connection is held for as long as a request may take to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from services.gateway.http.server import HeadWithBody, WebServer

HEAD_S, BODY_S = 0.2, 0.8  # a busy machine may hold a client up for the difference
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
OK = b"HTTP/1.1 200 OK"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once, or with the whole body where one is announced."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    message = {"type": "http.request", "more_body": scope["method"] == "POST"}
    while message["type"] == "http.request" and message["more_body"]:
        message = await receive()
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * (HEAD_S + BODY_S))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """A server that closes with bytes unread resets the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = WebServer(echo, "127.0.0.1", 0, head_timeout_s=HEAD_S, body_timeout_s=BODY_S)
    await server.start()
    reader, writer = await asyncio.open_connection(*server.address)
    yield reader, writer
    writer.close()
    await server.stop()


async def test_a_request_that_never_begins_ends_the_connection() -> None:
    async with asyncio.timeout(20), connected() as (reader, _):
        assert await rest_of(reader) == b""


async def test_a_head_that_never_ends_ends_the_connection() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        end = asyncio.ensure_future(rest_of(reader))
        for byte in b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100:
            writer.write(bytes([byte]))
            await asyncio.wait([end], timeout=0.01)
            if end.done():
                break
        assert end.done() and end.result() == b""


async def test_a_body_that_never_ends_ends_the_connection() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(POST + b"abc")
        assert await rest_of(reader) == b""


async def test_a_request_behind_another_has_no_more_time() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(POST + b"abcd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"\r\n")
        assert await rest_of(reader) == b""


async def test_an_answer_may_take_longer_than_its_request() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(POST.replace(b"/ ", b"/slow ", 1) + b"ab")
        await asyncio.sleep(HEAD_S)
        writer.write(b"cd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")


async def test_a_head_leaves_with_the_first_of_its_body() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append)
    cycle: Any = SimpleNamespace(transport=transport)
    cycle.transport = HeadWithBody(cycle)
    for part in (b"head ", b"body", b"more"):
        cycle.transport.write(part)
    assert written == [b"head body", b"more"]


async def test_a_head_without_body_leaves() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert OK in await reader.readuntil(b"\r\n\r\n")


async def test_who_waits_for_a_go_gets_it_and_then_the_answer() -> None:
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(POST.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"abcd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")


async def test_it_is_clients_who_close_idle_connections() -> None:
    """A server that closes first may meet a request that is on its way."""
    server = WebServer(echo, "127.0.0.1", 0)
    clients_s = httpx.Limits().keepalive_expiry
    assert clients_s is not None
    assert server._server.config.timeout_keep_alive > 2 * clients_s
    await server.stop()
