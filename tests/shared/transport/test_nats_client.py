"""The shorter path for messages and replies, over a real nats-server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.metadata import version

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadSubjectError, NoRespondersError, TimeoutError

from shared import subjects
from shared.transport import nats_client
from shared.transport.nats_client import DirectClient
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S

SUBJECT = subjects.sent_by(subjects.list_blocks("prefill", "prefill-1"), "kv_index-1")


class Errors:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def receive(self, error: Exception) -> None:
        self.seen.append(str(error))


Connect = Callable[[str], Awaitable[DirectClient]]


@pytest.fixture
def errors() -> Errors:
    return Errors()


@pytest.fixture
async def connect(nats_server: NatsServer, errors: Errors) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connected(process_id: str) -> DirectClient:
            client = DirectClient()
            inbox = subjects.inbox_prefix(process_id)
            url = nats_server.url(process_id)
            await client.connect(url, inbox_prefix=inbox, error_cb=errors.receive)
            stack.push_async_callback(client.close)
            return client

        yield connected


async def flush_all(client: DirectClient) -> None:
    """The first PING may be sent before data that is still buffered."""
    for _ in range(2):
        await client.flush()


async def serve(client: DirectClient, handler: Callable[[bytes], bytes | None]) -> None:
    async def receive(subject: str, reply: str, data: bytes) -> None:
        response = handler(data)
        if response is not None:
            await client.publish(reply, response)

    await client.listen(SUBJECT, receive)
    await flush_all(client)


async def test_messages_and_replies_bypass_nats_py_queues(connect: Connect) -> None:
    """nats-py counts only messages on its own path: the counters stay 0."""
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    await serve(worker, bytes.upper)
    requests = [
        requester.request_bytes(SUBJECT, b"%d: abc" % n, timeout_s=LIMIT_S) for n in range(20)
    ]  # concurrent, and the first of this client
    assert await asyncio.gather(*requests) == [b"%d: ABC" % n for n in range(20)]
    assert (requester.stats["in_msgs"], worker.stats["in_msgs"]) == (0, 0)


async def test_messages_use_nats_py_queues_without_override(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DirectClient, "_process_msg")
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    await serve(worker, bytes.upper)
    assert await requester.request_bytes(SUBJECT, b"abc", timeout_s=LIMIT_S) == b"ABC"
    assert (requester.stats["in_msgs"], worker.stats["in_msgs"]) == (1, 1)


async def test_late_reply_does_not_answer_another_request(connect: Connect) -> None:
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    withheld: list[Msg] = []

    async def handler(message: Msg) -> None:
        withheld.append(message)
        if len(withheld) == 2:
            await withheld[0].respond(b"first")
            await withheld[1].respond(b"second")
            await withheld[1].respond(b"again")

    await worker.subscribe(SUBJECT, cb=handler)
    await flush_all(worker)
    with pytest.raises(TimeoutError):
        await requester.request_bytes(SUBJECT, b"", timeout_s=0.05)
    assert await requester.request_bytes(SUBJECT, b"", timeout_s=LIMIT_S) == b"second"
    assert requester._replies == {}


async def test_request_without_responder_raises(connect: Connect) -> None:
    requester = await connect("kv_index-1")
    with pytest.raises(NoRespondersError):
        await requester.request_bytes(SUBJECT, b"", timeout_s=LIMIT_S)
    with pytest.raises(BadSubjectError):
        await requester.request_bytes("a b", b"", timeout_s=LIMIT_S)
    assert requester._replies == {}


async def test_request_can_be_cancelled(connect: Connect) -> None:
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    await serve(worker, lambda data: None)
    request = asyncio.create_task(requester.request_bytes(SUBJECT, b"", timeout_s=60))
    while not requester._replies:
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert requester._replies == {}


@pytest.mark.parametrize("error", [ValueError("a bug"), BaseException("a bug")])
async def test_handler_error_does_not_end_subscription(
    error: BaseException, connect: Connect, errors: Errors
) -> None:
    """Native code panics with a BaseException."""
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")

    def handler(data: bytes) -> bytes:
        if data == b"bad":
            raise error
        return data

    await serve(worker, handler)
    bad = asyncio.create_task(requester.request_bytes(SUBJECT, b"bad", timeout_s=60))
    while not requester._replies:
        await asyncio.sleep(0)
    assert await requester.request_bytes(SUBJECT, b"good", timeout_s=LIMIT_S) == b"good"
    bad.cancel()
    (seen,) = errors.seen
    assert seen.endswith("a bug")


async def test_no_delivery_after_unsubscribe(connect: Connect) -> None:
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    received: list[bytes] = []

    async def receive(subject: str, reply: str, data: bytes) -> None:
        received.append(data)
        if data == b"last":
            await subscription.unsubscribe()

    subscription = await worker.listen(SUBJECT, receive)
    await flush_all(worker)
    for data in (b"last", b"one more"):  # in one segment: both are read at once
        await requester.publish(SUBJECT, data)
    await flush_all(requester)
    await flush_all(worker)
    assert received == [b"last"]
    assert worker._takers == {}


async def test_cancelled_flush_does_not_break_client(connect: Connect) -> None:
    requester, worker = await connect("kv_index-1"), await connect("prefill-1")
    await serve(worker, bytes.upper)
    for client in (requester, worker):
        flush = asyncio.create_task(client.flush())
        await asyncio.sleep(0)  # sends its PING
        flush.cancel()
        await asyncio.gather(flush, return_exceptions=True)
        await flush_all(client)  # the first PONG belongs to the cancelled flush
    assert await requester.request_bytes(SUBJECT, b"abc", timeout_s=LIMIT_S) == b"ABC"


async def test_cancellation_that_coincides_with_the_pong_ends_the_flush(connect: Connect) -> None:
    client = await connect("kv_index-1")
    flushing = asyncio.create_task(client.flush_all())
    await asyncio.sleep(0)
    client._pongs.pop().set_result(True)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing


def test_nats_py_internals_have_expected_parameters() -> None:
    """Review a release that changes them before pyproject.toml admits it."""
    assert version("nats-py").startswith(f"{nats_client.TESTED_RELEASE}.")
    found = {
        name: tuple(inspect.signature(getattr(Client, name)).parameters)
        for name in nats_client.INTERNALS
    }
    assert found == nats_client.INTERNALS


async def test_nats_py_has_the_attributes_in_use(connect: Connect) -> None:
    client = await connect("kv_index-1")
    subscription = await client.subscribe(SUBJECT)
    assert [name for name in nats_client.CLIENT_ATTRIBUTES if not hasattr(client, name)] == []
    missing = [n for n in nats_client.SUBSCRIPTION_ATTRIBUTES if not hasattr(subscription, n)]
    assert missing == []
