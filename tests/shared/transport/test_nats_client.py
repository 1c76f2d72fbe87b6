"""The shorter way of messages and replies, over a real nats-server."""

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
from tests.servers import NatsServer

SUBJECT = subjects.sent_by(subjects.list_blocks("prefill", "prefill-1"), "kv_index-1")


class Errors:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def take(self, error: Exception) -> None:
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
            await client.connect(url, inbox_prefix=inbox, error_cb=errors.take)
            stack.push_async_callback(client.close)
            return client

        yield connected


async def flushed(client: DirectClient) -> None:
    """A first PING may overtake what is still buffered."""
    for _ in range(2):
        await client.flush()


async def answer_on(client: DirectClient, answer: Callable[[bytes], bytes | None]) -> None:
    async def take(subject: str, reply: str, data: bytes) -> None:
        told = answer(data)
        if told is not None:
            await client.publish(reply, told)

    await client.listen(SUBJECT, take)
    await flushed(client)


async def test_messages_and_replies_take_the_shorter_way(connect: Connect) -> None:
    """nats-py counts those that take its own; else only time would tell."""
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    await answer_on(worker, bytes.upper)
    asked = [
        asker.request_bytes(SUBJECT, b"%d: abc" % n, timeout_s=5) for n in range(20)
    ]  # the first ones
    assert await asyncio.gather(*asked) == [b"%d: ABC" % n for n in range(20)]
    assert (asker.stats["in_msgs"], worker.stats["in_msgs"]) == (0, 0)


async def test_without_it_they_take_nats_pys(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DirectClient, "_process_msg")
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    await answer_on(worker, bytes.upper)
    assert await asker.request_bytes(SUBJECT, b"abc", timeout_s=5) == b"ABC"
    assert (asker.stats["in_msgs"], worker.stats["in_msgs"]) == (1, 1)


async def test_a_reply_that_comes_too_late_is_nobody_elses(connect: Connect) -> None:
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    withheld: list[Msg] = []

    async def answer(message: Msg) -> None:
        withheld.append(message)
        if len(withheld) == 2:
            await withheld[0].respond(b"first")
            await withheld[1].respond(b"second")
            await withheld[1].respond(b"again")

    await worker.subscribe(SUBJECT, cb=answer)
    await flushed(worker)
    with pytest.raises(TimeoutError):
        await asker.request_bytes(SUBJECT, b"", timeout_s=0.05)
    assert await asker.request_bytes(SUBJECT, b"", timeout_s=5) == b"second"
    assert asker._replies == {}


async def test_nobody_listens(connect: Connect) -> None:
    asker = await connect("kv_index-1")
    with pytest.raises(NoRespondersError):
        await asker.request_bytes(SUBJECT, b"", timeout_s=5)
    with pytest.raises(BadSubjectError):
        await asker.request_bytes("a b", b"", timeout_s=5)
    assert asker._replies == {}


async def test_who_asks_may_leave(connect: Connect) -> None:
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    await answer_on(worker, lambda data: None)
    asking = asyncio.create_task(asker.request_bytes(SUBJECT, b"", timeout_s=60))
    while not asker._replies:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert asker._replies == {}


async def test_what_a_taker_raises_ends_nothing(connect: Connect, errors: Errors) -> None:
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")

    def answer(data: bytes) -> bytes:
        if data == b"bad":
            raise ValueError("a bug")
        return data

    await answer_on(worker, answer)
    bad = asyncio.create_task(asker.request_bytes(SUBJECT, b"bad", timeout_s=60))
    while not asker._replies:
        await asyncio.sleep(0)
    assert await asker.request_bytes(SUBJECT, b"good", timeout_s=5) == b"good"
    bad.cancel()
    assert errors.seen == ["a bug"]


async def test_who_has_unsubscribed_hears_no_more(connect: Connect) -> None:
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    heard: list[bytes] = []

    async def take(subject: str, reply: str, data: bytes) -> None:
        heard.append(data)
        if data == b"last":
            await subscription.unsubscribe()

    subscription = await worker.listen(SUBJECT, take)
    await flushed(worker)
    for data in (b"last", b"one more"):  # in one segment: both are read at once
        await asker.publish(SUBJECT, data)
    await flushed(asker)
    await flushed(worker)
    assert heard == [b"last"]
    assert worker._takers == {}


async def test_a_flush_that_is_given_up_ends_nothing(connect: Connect) -> None:
    asker, worker = await connect("kv_index-1"), await connect("prefill-1")
    await answer_on(worker, bytes.upper)
    for client in (asker, worker):
        flush = asyncio.create_task(client.flush())
        await asyncio.sleep(0)  # its PING is on the way
        flush.cancel()
        await asyncio.gather(flush, return_exceptions=True)
        await flushed(client)  # the first PONG is of the flush that was given up
    assert await asker.request_bytes(SUBJECT, b"abc", timeout_s=5) == b"ABC"


def test_nats_py_has_the_internals_that_are_overridden() -> None:
    """A release that moves them must be looked at before it is admitted."""
    assert version("nats-py").startswith(f"{nats_client.TESTED_RELEASE}.")
    found = {
        name: tuple(inspect.signature(getattr(Client, name)).parameters)
        for name in nats_client.INTERNALS
    }
    assert found == nats_client.INTERNALS


async def test_nats_py_has_the_attributes_that_are_used(connect: Connect) -> None:
    client = await connect("kv_index-1")
    subscription = await client.subscribe(SUBJECT)
    assert [name for name in nats_client.CLIENT_ATTRIBUTES if not hasattr(client, name)] == []
    missing = [n for n in nats_client.SUBSCRIPTION_ATTRIBUTES if not hasattr(subscription, n)]
    assert missing == []
