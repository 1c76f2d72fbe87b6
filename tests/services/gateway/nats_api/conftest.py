from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import nats
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.client.hearth_nats import HearthClient
from services.gateway.service import GatewayService
from shared.subjects import api_request
from tests.services.gateway.conftest import Cluster
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until


def has_joined(gateway: GatewayService) -> bool:
    assert gateway._nats_api is not None
    return gateway._nats_api._leave is not None


def is_idle(gateway: GatewayService) -> bool:
    """Whether nothing is left of any request."""
    api = gateway._nats_api
    assert api is not None
    parts = api._parts
    is_empty = not (api._running or api._tasks or api._num_running or parts.listeners._open)
    is_empty = is_empty and not gateway.submission._unsent._tenants
    return is_empty and not len(gateway._driver) and not parts.transport.budget.num_bytes


@dataclass
class Api:
    """A cluster, and connections of a client: its own protocol, and raw."""

    cluster: Cluster
    client: HearthClient
    raw: Client
    client_id: str = "client-1"

    async def send(
        self,
        endpoint: str,
        data: bytes | dict[str, Any],
        *,
        gateway_id: str = "",
        headers: dict[str, str] | None = None,
    ) -> asyncio.Queue[Msg]:
        """Returns the replies as they arrive."""
        received: asyncio.Queue[Msg] = asyncio.Queue()
        inbox = self.raw.new_inbox()

        async def take(message: Msg) -> None:
            received.put_nowait(message)

        await self.raw.subscribe(inbox, cb=take)
        payload = data if isinstance(data, bytes) else json.dumps(data).encode()
        subject = api_request(endpoint, self.client_id) + (f".{gateway_id}" if gateway_id else "")
        await self.raw.publish(subject, payload, reply=inbox, headers=headers)
        return received

    async def reply(self, endpoint: str, data: Any, **options: Any) -> Msg:
        """The next reply."""
        return await next_of(await self.send(endpoint, data, **options))

    async def events(self, endpoint: str, body: dict[str, Any]) -> list[Any]:
        return [each async for each in self.client.stream(endpoint, body)]


async def next_of(received: asyncio.Queue[Msg]) -> Msg:
    return await asyncio.wait_for(received.get(), timeout=LIMIT_S)


async def all_of(received: asyncio.Queue[Msg]) -> list[Msg]:
    """The messages of a stream, in their order."""
    messages = [await next_of(received)]
    while "Hearth-End" not in (messages[-1].headers or {}):
        messages.append(await next_of(received))
    return messages


@contextlib.asynccontextmanager
async def connected(server: NatsServer, name: str) -> AsyncIterator[tuple[HearthClient, Client]]:
    client = await HearthClient.connect(server.url(name))
    raw = await nats.connect(server.url(name), inbox_prefix=f"_INBOX.{name}".encode())
    try:
        yield client, raw
    finally:
        await client.close()
        await raw.close()


@pytest_asyncio.fixture(loop_scope="session")
async def api(cluster: Cluster, nats_server: NatsServer) -> AsyncIterator[Api]:
    """At its end nothing may be left of any request."""
    await until(lambda: has_joined(cluster.gateway))
    async with connected(nats_server, "client-1") as (client, raw):
        yield Api(cluster, client, raw)
        for each in cluster.decodes:
            each.reset(cluster.answer)
        cluster.scheduler.reset(cluster.decodes)
        await until(lambda: is_idle(cluster.gateway))
