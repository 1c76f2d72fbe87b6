"""Limits of connections: counts, of a server, and on a live gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from services.gateway.http.connections import (
    MAX_CONNECTIONS,
    MAX_RESERVED,
    Connections,
    OpenConnection,
    connections_within,
)
from services.gateway.http.server import IS_RESERVED, ON_AUTHENTICATED, PROBES, WebServer
from shared.errors import Overloaded
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.support.waiting import LIMIT_S, until


class Opened:
    """Connections and which of them were closed."""

    def __init__(self, **limits: Any) -> None:
        self.connections = Connections(**limits)
        self.closed: list[str] = []

    def open(self, name: str, address: str = "a") -> OpenConnection:
        connection = self.connections.open(address, lambda: self.closed.append(name))
        assert connection is not None
        return connection

    def held(self, name: str, tenant_id: str, *, is_busy: bool = False) -> OpenConnection:
        """A connection after its first request, or during it."""
        connection = self.open(name)
        connection.begin()
        connection.authenticate(tenant_id)
        if not is_busy:
            connection.end()
        return connection

    def check_empty(self) -> None:
        found = self.connections
        assert found._num_open == 0
        assert not (found._num_held or found._idle or found._reserved)


def test_connections_without_a_key_are_bounded_by_address() -> None:
    opened = Opened(max_connections=6, max_without_key=1, max_opening=2)
    one, two = opened.open("1"), opened.open("2")
    assert opened.connections.open("a", lambda: None) is None
    assert not opened.connections.may_stay(two)
    one.lose()
    assert opened.connections.may_stay(two)
    two.lose()
    two.lose()
    opened.check_empty()


def test_idle_connection_of_the_largest_holder_is_closed_first() -> None:
    opened = Opened(max_connections=8)
    victims = [opened.held("v", "victim")]
    holders = [opened.held(str(i), "holder") for i in range(2)]
    others = [opened.open(f"o{i}", "b") for i in range(4)]
    others.append(opened.open("c", "c"))
    holders[0].begin()
    holders[0].end()  # idle since now: the other one goes first
    victims.extend(opened.open(f"new{i}", "d") for i in range(3))
    assert opened.closed == ["o0", "o1", "1"]
    for each in (*victims, *holders, *others):
        each.lose()
    opened.check_empty()


def test_tenant_has_a_quarter_of_all_connections() -> None:
    opened = Opened(max_connections=8)
    first, second = (opened.held(name, "t") for name in "12")
    third = opened.held("3", "t")
    assert opened.closed == ["1"]
    second.begin()
    third.begin()
    fourth = opened.open("4")
    fourth.begin()
    with pytest.raises(Overloaded):
        fourth.authenticate("t")
    assert not fourth.has_key
    fourth.authenticate("u")
    second.end()
    fourth.authenticate("t")  # one connection, keys of two tenants: it counts for the last
    assert opened.closed == ["1", "2"]
    for each in (first, second, third, fourth):
        each.end()
        each.lose()
    opened.check_empty()


def test_reserved_connections_replace_each_other() -> None:
    opened = Opened(max_connections=1, max_reserved=2)
    held = opened.held("1", "t", is_busy=True)
    reserved = [opened.open(name, name) for name in "234"]
    assert [each.is_reserved for each in reserved] == [True] * 3
    assert opened.closed == ["2"]
    held.end()
    assert not opened.open("5", "5").is_reserved
    assert opened.closed == ["2", "1"]


@pytest.mark.parametrize("num_descriptors", [64, 1024, 4096, 1 << 20])
def test_connections_leave_descriptors_to_the_rest_of_the_process(num_descriptors: int) -> None:
    found = connections_within(num_descriptors)
    spare = num_descriptors - found - MAX_RESERVED
    assert 0 < found <= MAX_CONNECTIONS
    assert spare >= min(512, num_descriptors // 4)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Authenticates the tenant that the path names; /wait/… ends with its client."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    if scope["path"] not in ("/health", "/ready"):
        scope["state"][ON_AUTHENTICATED](scope["path"].rpartition("/")[2])
    if scope["path"].startswith("/wait"):
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    status = 503 if scope["state"][IS_RESERVED] and scope["path"] not in PROBES else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def requested(
    server: WebServer, path: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    return reader, writer


async def status_of(server: WebServer, path: str) -> bytes:
    reader, _ = await requested(server, path)
    return (await reader.readline())[9:12]


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
async def test_tenant_at_the_limit_leaves_room_for_others_and_probes(is_busy: bool) -> None:
    connections = Connections(max_connections=16)
    server = WebServer(app, "127.0.0.1", 0, connections=connections)  # type: ignore[arg-type]
    await server.start()
    kept = []
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2 * connections.max_connections):
            kept.append(await requested(server, "/wait/holder" if is_busy else "/holder"))
        await until(lambda: connections._num_held["tenant", "holder"] == connections.max_of_tenant)
        assert [await status_of(server, "/victim") for _ in range(8)] == [b"200"] * 8
        assert [await status_of(server, path) for path in ("/health", "/ready")] == [b"200"] * 2
    for _, writer in kept:
        writer.close()
    await server.stop()


async def test_probes_are_answered_while_all_connections_are_busy() -> None:
    connections = Connections(max_connections=4, max_reserved=2)
    server = WebServer(app, "127.0.0.1", 0, connections=connections)  # type: ignore[arg-type]
    await server.start()
    async with asyncio.timeout(LIMIT_S):
        kept = [await requested(server, f"/wait/{i}") for i in range(4)]
        await until(lambda: not connections._idle and connections._num_open == 4)
        kept.extend([await asyncio.open_connection(*server.address) for _ in range(4)])  # silent
        assert [await status_of(server, path) for path in ("/health", "/ready")] == [b"200"] * 2
        assert await status_of(server, "/victim") == b"503"
    for _, writer in kept:
        writer.close()
    await server.stop()


async def test_idle_connections_close_and_one_with_a_key_stays(cluster: Cluster) -> None:
    server = cluster.gateway._web_server
    connections = server.connections
    given = (connections.grace_s, connections._max_without_key)
    connections.grace_s, connections._max_without_key = 0.2, 0
    try:
        host, port = server.address
        reader, writer = await asyncio.open_connection(host, port)
        assert (await cluster.http.post(CHAT, json=BODY)).status_code == 200
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        writer.close()
        assert (await cluster.http.post(CHAT, json=BODY)).status_code == 200
    finally:
        connections.grace_s, connections._max_without_key = given


async def test_refusal_beyond_the_limit_has_the_envelope_of_its_path(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = cluster.gateway._web_server.connections
    monkeypatch.setattr(connections, "max_connections", 0)
    monkeypatch.setattr(connections, "_evict_of_largest", lambda: False)
    host, port = cluster.gateway._web_server.address
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        chat = await client.post(CHAT, json=BODY)
        messages = await client.post("/v1/messages", json=BODY)
        run = await client.post("/client/v4/accounts/a/ai/run/m", json=BODY)
        assert (await client.get("/health")).status_code == 200
    assert {each.headers["retry-after"] for each in (chat, messages, run)} == {"1"}
    assert chat.json()["error"]["code"] == "no_capacity"
    assert messages.json()["type"] == "error"
    assert messages.json()["request_id"]
    assert run.json()["success"] is False
    assert [each.status_code for each in (chat, messages, run)] == [503, 503, 429]
