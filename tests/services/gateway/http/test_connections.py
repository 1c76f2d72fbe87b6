"""Limits of connections: counts, and on a live gateway."""

from __future__ import annotations

import asyncio

from services.gateway.http.connections import Connections
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.openai.test_chat_http import BODY, CHAT


def test_connections_without_a_key_are_bounded_by_address() -> None:
    connections = Connections(max_connections=6, max_without_key=1, max_opening=2)
    assert [connections.opened("a") for _ in range(3)] == [True, True, False]
    assert not connections.may_stay("a")
    connections.closed("a", has_key=False)
    connections.authenticated("a")
    assert connections.may_stay("a")
    assert [connections.opened("b") for _ in range(2)] == [True, True]
    assert [connections.opened("c"), connections.opened("d")] == [True, True]
    assert not connections.opened("e")  # the seventh of all
    for address in ("b", "b", "c", "d", "e", "a"):
        connections.closed(address, has_key=False)
    connections.closed("a", has_key=True)
    assert connections._num_open == 0 and not connections._without_key


async def test_idle_connections_close_and_one_with_a_key_stays(cluster: Cluster) -> None:
    server = cluster.gateway._web_server
    connections = server.connections
    given = (connections.grace_s, connections._max_without_key)
    connections.grace_s, connections._max_without_key = 0.2, 0
    try:
        host, port = server.address
        reader, writer = await asyncio.open_connection(host, port)
        assert (await cluster.http.post(CHAT, json=BODY)).status_code == 200
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        assert (await cluster.http.post(CHAT, json=BODY)).status_code == 200
    finally:
        connections.grace_s, connections._max_without_key = given
