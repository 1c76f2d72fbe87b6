"""Messages with headers, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from shared.errors import DependencyUnavailable, PayloadTooLarge
from shared.subjects import API_GROUP, API_REQUESTS, api_request
from shared.transport.bus import NatsBus
from shared.transport.nats_client import DirectClient
from shared.transport.server_config import NatsUser
from tests.support.nats_clients import connect_ordered
from tests.support.servers import PASSWORD, NatsServer
from tests.support.waiting import LIMIT_S

MAX_PAYLOAD_BYTES = 8192
SUBJECT, INBOX = api_request("chat", "client-1"), "_INBOX.client-1.abc"
Received = tuple[str, str, bytes, bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [NatsUser("gateway", "gateway-1", PASSWORD), NatsUser("client", "client-1", PASSWORD)]
    server = NatsServer(tmp_path_factory.mktemp("nats"), users, max_payload_bytes=MAX_PAYLOAD_BYTES)
    yield server
    server.stop()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def bus(server: NatsServer, stack: AsyncExitStack) -> NatsBus:
    bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1", to_clients=True)
    stack.push_async_callback(bus.close)
    return bus


@pytest.fixture
async def client(server: NatsServer, stack: AsyncExitStack) -> Client:
    client = await connect_ordered(server.url("client-1"), inbox_prefix=b"_INBOX.client-1")
    stack.push_async_callback(client.close)
    return client


class Inbox:
    def __init__(self) -> None:
        self._received: asyncio.Queue[Received] = asyncio.Queue()

    async def take(self, *received: str | bytes) -> None:
        if b"bug" in received:
            raise RuntimeError("a bug")
        self._received.put_nowait(received)  # type: ignore[arg-type]

    async def next(self) -> Received:
        return await asyncio.wait_for(self._received.get(), timeout=LIMIT_S)


@pytest.mark.parametrize("is_direct", [True, False])
async def test_message_arrives_with_its_encoded_headers(
    bus: NatsBus, client: Client, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """Also where nats-py queues the message."""
    if not is_direct:
        monkeypatch.delattr(DirectClient, "_process_msg")
    inbox = Inbox()
    await bus.untyped.listen(API_REQUESTS, inbox.take, queue=API_GROUP)
    await bus.flush()
    await client.publish(SUBJECT, b"{}", reply=INBOX)
    await client.publish(SUBJECT, b"bug")
    await client.publish(SUBJECT, b"", headers={"A-b": "c d", "E": ""})
    assert await inbox.next() == (SUBJECT, INBOX, b"{}", b"")
    assert await inbox.next() == (SUBJECT, "", b"", b"NATS/1.0\r\nA-b: c d\r\nE: \r\n\r\n")


async def test_missing_receiver_is_reported_with_a_status(bus: NatsBus, client: Client) -> None:
    inbox, requests = Inbox(), Inbox()
    messages = bus.untyped
    await messages.listen(f"{messages.inbox}.check.*", inbox.take)
    await messages.listen(API_REQUESTS, requests.take)
    await bus.flush()
    await client.publish(SUBJECT, b"{}", reply=INBOX)
    await requests.next()
    await messages.send(INBOX, b"x", reply=f"{messages.inbox}.check.7")
    subject, _, data, headers = await inbox.next()
    assert (subject, data) == (f"{messages.inbox}.check.7", b"")
    assert headers.startswith(b"NATS/1.0 503\r\n")


@pytest.mark.parametrize("headers", [b"NATS/1.0", b"\xff" * 20, b"NATS/1.0\r\n: \r\n\r\n", b"x"])
async def test_malformed_headers_reach_the_handler_alone(
    server: NatsServer, bus: NatsBus, headers: bytes
) -> None:
    """nats-py's decoder would end the connection for some of them."""
    inbox = Inbox()
    await bus.untyped.listen(API_REQUESTS, inbox.take)
    await bus.flush()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'CONNECT {"user":"client-1","pass":"%s","headers":true}\r\n' % PASSWORD.encode())
    writer.write(b"HPUB %s %d %d\r\n%s\r\n" % (SUBJECT.encode(), *[len(headers)] * 2, headers))
    writer.write(b"PUB %s 2\r\n{}\r\n" % SUBJECT.encode())
    assert await inbox.next() == (SUBJECT, "", b"", headers)
    assert await inbox.next() == (SUBJECT, "", b"{}", b"")
    assert bus.num_reconnects == 0
    writer.close()


async def test_too_large_message_is_rejected_before_sending(bus: NatsBus, client: Client) -> None:
    """Headers count: beyond its bound the server closes the connection."""
    inbox = Inbox()
    await bus.untyped.listen(API_REQUESTS, inbox.take)
    await bus.flush()
    replies = await client.subscribe("_INBOX.client-1.>")
    await client.publish(SUBJECT, b"{}", reply=INBOX)
    await inbox.next()
    for data, headers in ((b"x" * 8193, {}), (b"x" * 8000, {"A": "b" * 200}), (b"", {"ä": "x"})):
        with pytest.raises((PayloadTooLarge, DependencyUnavailable)):
            await bus.untyped.send(INBOX, data, headers=headers)
    await bus.untyped.send(INBOX, b"x" * 8192)
    await bus.untyped.send(INBOX, b"x" * 8000, headers={"A": "é\r\n" * 10})
    assert len((await replies.next_msg(timeout=LIMIT_S)).data) == 8192
    last = await replies.next_msg(timeout=LIMIT_S)
    assert (len(last.data), last.headers) == (8000, {"A": "é  " * 9 + "é"})
    assert bus.num_reconnects == 0


async def test_messages_until_the_end_of_a_subscription_are_handled(
    bus: NatsBus, client: Client
) -> None:
    inbox = Inbox()
    stop = await bus.untyped.listen(API_REQUESTS, inbox.take, queue=API_GROUP)
    await bus.flush()
    for _ in range(3):
        await client.publish(SUBJECT, b"{}", reply=INBOX)
    for _ in range(2):  # the first PING may overtake data that is still buffered
        await client.flush()
    await stop()
    for _ in range(3):
        assert (await inbox.next())[1] == INBOX
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request(SUBJECT, b"{}", timeout=20)


async def test_closed_connection_raises_dependency_unavailable(
    server: NatsServer, tmp_path: Path
) -> None:
    bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1", to_clients=True)
    await bus.close()
    with pytest.raises(DependencyUnavailable, match="cannot publish"):
        await bus.untyped.send(INBOX, b"x")
