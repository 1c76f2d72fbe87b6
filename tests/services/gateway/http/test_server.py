"""Slow clients: the server closes a connection whose request exceeds a timeout."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import uvloop

from services.gateway.http import server as server_module
from services.gateway.http.connections import Connections
from services.gateway.http.server import (
    MAX_PIPELINED,
    MAX_READS_PER_TURN,
    ON_AUTHENTICATED,
    HeadWithBody,
    WebServer,
)
from shared.background import TASK_FAILED
from tests.support.waiting import LIMIT_S, until

HEAD_S, BODY_S = 0.2, 0.8  # the difference covers delays of the client on a busy machine
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK"
LEFT = asyncio.Event()  # the client of a request for /wait has disconnected
TOLD = asyncio.Event()  # a request for /told is answered


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Responds 200 without a body: at once, or to a POST after its complete body."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    message = {"type": "http.request", "more_body": scope["method"] == "POST"}
    while message["type"] == "http.request" and message["more_body"]:
        message = await receive()
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        LEFT.set()
        return
    if scope["path"] == "/parts":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"", b"b"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if scope["path"] == "/told":
        await until(TOLD.is_set)
    if scope["path"] == "/slow":
        await asyncio.sleep(HEAD_S + BODY_S + 0.1)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Reads until the connection ends: a server that closes with unread bytes resets it."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@asynccontextmanager
async def started() -> AsyncIterator[WebServer]:
    server = WebServer(app, "127.0.0.1", 0, head_timeout_s=HEAD_S, body_timeout_s=BODY_S)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with started() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        yield reader, writer
        writer.close()


async def test_connection_without_a_request_is_closed() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, _):
        assert await rest_of(reader) == b""


async def test_unfinished_head_closes_the_connection() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        end = asyncio.ensure_future(rest_of(reader))
        for byte in b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100:
            writer.write(bytes([byte]))
            await asyncio.wait([end], timeout=0.01)
            if end.done():
                break
        assert end.done() and end.result() == b""


async def test_unfinished_body_closes_the_connection() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(POST + b"abc")
        assert await rest_of(reader) == b""


async def test_second_request_has_the_same_head_timeout() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(POST + b"abcd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"\r\n")
        assert await rest_of(reader) == b""


async def test_response_may_take_longer_than_both_timeouts() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(POST.replace(b"/ ", b"/slow ", 1) + b"ab")
        await asyncio.sleep(HEAD_S)
        writer.write(b"cd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")


async def test_client_that_leaves_with_another_request_queued_is_noticed() -> None:
    """uvicorn marks only the last request of a connection, which has not begun."""
    async with asyncio.timeout(LIMIT_S), started() as server:
        LEFT.clear()
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(GET.replace(b"/ ", b"/wait ", 1) + GET)
        await until(lambda: any(each.pipeline for each in server._server.server_state.connections))
        writer.close()
        await LEFT.wait()


async def test_number_of_queued_requests_is_bounded() -> None:
    async with asyncio.timeout(LIMIT_S), started() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET.replace(b"/ ", b"/wait ", 1) + GET * (MAX_PIPELINED + 1))
        assert await rest_of(reader) == b""
        writer.close()


def test_waiting_connections_are_accepted_in_few_turns() -> None:
    async def accepted() -> int:
        server = WebServer(app, "127.0.0.1", 0)
        await server.start()
        clients = [socket.create_connection(server.address) for _ in range(64)]
        for _ in range(8):
            await asyncio.sleep(0)
        num_accepted = len(server._server.server_state.connections)
        for each in clients:
            each.close()
        await server.stop()
        return num_accepted

    assert uvloop.run(accepted()) == 64


async def test_request_of_another_tenant_starts_among_those_of_a_burst() -> None:
    paths: list[str] = []

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope.get("path", ""))
        await app(scope, receive, send)

    def tenant_of(headers: Any) -> str:
        return dict(headers)[b"tenant"].decode()

    server = WebServer(recorded, "127.0.0.1", 0, tenant_of=tenant_of)
    await server.start()
    async with asyncio.timeout(LIMIT_S):
        writers = [(await asyncio.open_connection(*server.address))[1] for _ in range(42)]
        others, own, probe = writers[:40], writers[40], writers[41]
        for writer in others:
            writer.write(b"GET /burst HTTP/1.1\r\nhost: x\r\ntenant: one\r\n\r\n")
        own.write(b"GET /own HTTP/1.1\r\nhost: x\r\ntenant: other\r\n\r\n")
        probe.write(b"GET /health HTTP/1.1\r\nhost: x\r\ntenant: one\r\n\r\n")
        await until(lambda: len(paths) == 43)
        assert {*paths[:12]} >= {"/own", "/health"}
        for writer in writers:
            writer.close()
    await server.stop()


async def test_burst_on_open_connections_is_parsed_by_turns_of_the_tenants() -> None:
    parsed: list[str] = []

    async def authenticated(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["state"][ON_AUTHENTICATED](tenant_of(scope["headers"]))
        await app(scope, receive, send)

    def tenant_of(headers: Any) -> str:
        parsed.append(dict(headers)[b"tenant"].decode())
        return parsed[-1]

    server = WebServer(authenticated, "127.0.0.1", 0, tenant_of=tenant_of)
    await server.start()
    tenants = ["one"] * (6 * MAX_READS_PER_TURN) + ["other"]
    async with asyncio.timeout(LIMIT_S):
        streams = [await asyncio.open_connection(*server.address) for _ in tenants]
        for _ in range(2):  # the connections are their tenants' from the first response on
            parsed.clear()
            for tenant, (_, writer) in zip(tenants, streams, strict=True):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\ntenant: %b\r\n\r\n" % tenant.encode())
            for reader, _ in streams:
                assert (await reader.readuntil(b"0\r\n\r\n")).startswith(OK)
        for _, writer in streams:
            writer.close()
    assert parsed.index("other") <= 4 * MAX_READS_PER_TURN  # parsed and authenticated
    await server.stop()


async def test_connection_whose_request_waits_to_start_is_kept() -> None:
    async with asyncio.timeout(LIMIT_S):
        connections = Connections(max_without_key=0, grace_s=0.05)
        server = WebServer(app, "127.0.0.1", 0, connections=connections)
        await server.start()
        server._starts._num_left = 0
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET)
        await asyncio.sleep(3 * connections.grace_s)
        server._starts._next_turn()
        assert (await reader.readuntil(b"\r\n")).startswith(OK)
        assert await rest_of(reader)  # and then its time without a key has ended
        writer.close()
        await server.stop()


async def test_connection_whose_key_is_being_looked_up_is_kept() -> None:
    looked_up = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await looked_up.wait()
        await app(scope, receive, send)

    async with asyncio.timeout(LIMIT_S):
        connections = Connections(max_without_key=0, grace_s=0.05)
        server = WebServer(slow, "127.0.0.1", 0, connections=connections)
        await server.start()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET)
        await asyncio.sleep(3 * connections.grace_s)
        looked_up.set()
        assert (await reader.readuntil(b"\r\n")).startswith(OK)
        assert await rest_of(reader)
        writer.close()
        await server.stop()


async def test_bad_request_is_not_answered_in_the_place_of_an_earlier_one() -> None:
    async with asyncio.timeout(LIMIT_S), started() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET.replace(b"/ ", b"/wait ", 1) + b"bad\r\n\r\n")
        assert await rest_of(reader) == b""
        writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(GET * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            assert OK in await reader.readuntil(b"0\r\n\r\n")


async def test_head_is_sent_with_the_first_body_bytes() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append)
    cycle: Any = SimpleNamespace(transport=transport)
    cycle.transport = HeadWithBody(cycle)
    for part in (b"head ", b"body", b"more"):
        cycle.transport.write(part)
    assert written == [b"head body", b"more"]


async def test_response_to_a_head_request_is_sent() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert OK in await reader.readuntil(b"\r\n\r\n")


async def test_response_to_http_1_0_ends_with_its_connection() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(b"GET /parts HTTP/1.0\r\n\r\n")
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
        assert OK in head and b"transfer-encoding" not in head.lower()
        assert body == b"ab"


@pytest.mark.parametrize(
    "head",
    [b"1.1\r\n", b"1.1\r\nhost: x\r\nhost: x\r\n", b"1.0\r\nhost: x\r\nHost: y\r\n"],
    ids=["without", "two", "two of HTTP/1.0"],
)
async def test_request_with_another_number_of_hosts_is_rejected(head: bytes) -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(b"GET / HTTP/" + head + b"\r\n")
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 400 ")


async def test_expect_100_continue_is_answered_before_the_response() -> None:
    async with asyncio.timeout(LIMIT_S), connected() as (reader, writer):
        writer.write(POST.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"abcd")
        assert OK in await reader.readuntil(b"0\r\n\r\n")


async def test_idle_timeout_exceeds_that_of_clients() -> None:
    """If the server closes first, a client may already have sent the next request."""
    server = WebServer(app, "127.0.0.1", 0)
    client_idle_timeout_s = httpx.Limits().keepalive_expiry
    assert client_idle_timeout_s is not None
    assert server._server.config.timeout_keep_alive > 2 * client_idle_timeout_s
    await server.stop()


async def test_kernel_disconnects_lost_peers() -> None:
    """The options of the listening socket hold for its connections."""
    async with asyncio.timeout(LIMIT_S), started() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(POST + b"abcd")
        await reader.readuntil(b"0\r\n\r\n")
        (protocol,) = server._server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        tcp = socket.IPPROTO_TCP
        assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 60_000
        assert accepted.getsockopt(tcp, socket.TCP_KEEPIDLE) == 60
        assert accepted.getsockopt(tcp, socket.TCP_NOTSENT_LOWAT) == 64 * 1024
        writer.close()


async def test_idle_server_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)
    async with asyncio.timeout(LIMIT_S), started():
        pass


async def test_request_on_a_new_connection_is_answered_while_the_server_stops() -> None:
    server = WebServer(app, "127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(LIMIT_S):
        address = server.address
        idle, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        assert (await idle.readuntil(b"\r\n\r\n")).startswith(OK)
        reader, writer = await asyncio.open_connection(*address)
        stopping = asyncio.ensure_future(server.stop())
        await until(lambda: is_refused(address))
        writer.write(GET)
        assert (await rest_of(reader)).startswith(OK)
        assert await rest_of(idle) == b"0\r\n\r\n"  # of the first response
        await stopping


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_server_that_ends_by_itself_ends_the_process() -> None:
    reported: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reported.append(context["message"]))
    async with asyncio.timeout(LIMIT_S), started() as server:
        server._server.on_tick = AsyncMock(side_effect=OSError(24, "Too many open files"))  # type: ignore[method-assign]
        await until(lambda: bool(reported))
    assert reported == [TASK_FAILED]
