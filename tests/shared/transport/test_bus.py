"""The bus over a real nats-server, whose permissions keep processes apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import subjects
from shared.errors import (
    DependencyUnavailable,
    HearthError,
    InvalidRequest,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
)
from shared.messages import AbortRequest, BlocksRemoved, CancelQueued, Done, Failure, ListBlocks
from shared.transport.bus import NatsBus, error_of, failure_of, reply_to, without_password
from tests.servers import NatsServer

Connect = Callable[[str], Awaitable[NatsBus]]
ABORT = AbortRequest(placement_id=b"p" * 16, reason="stop")
# No msgpack; text that is not UTF-8; nested without end, where a field is skipped.
UNREADABLE_BYTES = (
    b"",
    b"\xc1",
    b"\x82\xa4type\xacCancelQueued\xaarequest_id\xa1\xff",
    b"\x83\xa4type\xacCancelQueued\xaarequest_id\xa1r\xa1x" + b"\x91" * 100_000,
)
AS_FAILURE = (b"\xacCancelQueued\xaarequest_id", b"\xa7Failure\xa4code")


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connected(process_id: str) -> NatsBus:
            bus = await NatsBus.connect(nats_server.url(process_id), process_id=process_id)
            stack.push_async_callback(bus.close)
            return bus

        yield connected


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[object] = asyncio.Queue()

    def take(self, message: object) -> None:
        self.messages.put_nowait(message)

    async def next(self) -> object:
        return await asyncio.wait_for(self.messages.get(), timeout=5)


async def test_publish_arrives_in_order(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")
    unsubscribe = await decode.subscribe(subject, AbortRequest, inbox.take)
    await decode.flush()
    sent = [AbortRequest(placement_id=bytes([n]) * 16, reason="stop") for n in range(50)]
    for message in sent:
        await gateway.publish(subject, message)
    assert [await inbox.next() for _ in sent] == sent
    await unsubscribe()
    await decode.flush()
    await gateway.publish(subject, ABORT)
    await gateway.flush()
    await decode.flush()
    assert inbox.messages.empty()


async def test_a_bad_message_does_not_end_a_subscription(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")

    def fragile(message: AbortRequest) -> None:
        if message.reason == "fenced":
            raise RuntimeError("a bug")
        inbox.take(message)

    await decode.subscribe(subject, AbortRequest, fragile)
    await decode.flush()
    await gateway.publish(subject, ListBlocks())
    await gateway.publish(subject, AbortRequest(placement_id=bytes(16), reason="fenced"))
    for data in UNREADABLE_BYTES:
        await gateway._client.publish(subjects.sent_by(subject, "gateway-1"), data)
    await gateway.publish(subject, ABORT)
    assert await inbox.next() == ABORT


@pytest.mark.parametrize("data", UNREADABLE_BYTES)
async def test_a_request_that_cannot_be_read_is_refused_as_such(data: bytes) -> None:
    decode = msgspec.msgpack.Decoder(CancelQueued).decode
    reply = await reply_to(lambda message: Done(), decode, data)
    assert isinstance(reply, Failure)
    assert (reply.code, reply.message[:19]) == ("invalid_request", "not a valid message")


@pytest.mark.parametrize("data", [each.replace(*AS_FAILURE) for each in UNREADABLE_BYTES])
async def test_a_reply_that_cannot_be_read_is_a_peers_failure(
    connect: Connect, data: bytes
) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")

    async def answer(message: Msg) -> None:
        await message.respond(data)

    await worker._client.subscribe(subjects.from_anyone(subject), cb=answer)
    await worker.flush()
    with pytest.raises(DependencyUnavailable, match="invalid reply on"):
        await index.request(subject, ListBlocks(), Done, timeout_s=2)


async def test_what_the_server_raises_the_client_gets(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    errors: list[Exception] = [
        Overloaded("full", retry_after_s=2.5),
        InvalidRequest("no", param="cursor"),
        ValueError("a secret of the implementation"),
    ]

    async def refuse(message: ListBlocks) -> Done:
        raise errors[message.cursor]

    subject = subjects.list_blocks("prefill", "prefill-1")
    await worker.serve(subject, ListBlocks, refuse)
    await worker.flush()
    with pytest.raises(Overloaded, match="full") as overloaded:
        await index.request(subject, ListBlocks(cursor=0), Done, timeout_s=2)
    assert overloaded.value.retry_after_s == 2.5
    with pytest.raises(InvalidRequest) as invalid:
        await index.request(subject, ListBlocks(cursor=1), Done, timeout_s=2)
    assert invalid.value.param == "cursor"
    with pytest.raises(HearthError, match=r"^internal error$") as internal:
        await index.request(subject, ListBlocks(cursor=2), Done, timeout_s=2)
    assert internal.value.code == "internal_error"
    with pytest.raises(InvalidRequest, match="not a valid message"):
        await index.request(subject, ABORT, Done, timeout_s=2)


def test_every_error_survives_the_wire() -> None:
    def tree(root: type[HearthError]) -> list[type[HearthError]]:
        children = [each for child in root.__subclasses__() for each in tree(child)]
        return [root, *children] if root.__module__ == "shared.errors" else []

    for error_class in tree(HearthError):
        error = error_class("why", param="field", retry_after_s=0.0)
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(failure_of(error)), type=Failure)
        back = error_of(wire)
        assert type(back) is error_class
        assert (back.message, back.param, back.retry_after_s) == ("why", "field", 0.0)
    assert type(error_of(Failure(code="of a newer version", message="?"))) is HearthError


async def test_nobody_there_and_nobody_answering(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")
    with pytest.raises(NoResponders):
        await index.request(subject, ListBlocks(), Done, timeout_s=2)
    release = asyncio.Event()

    async def silent(message: ListBlocks) -> Done:
        await release.wait()
        return Done()

    await worker.serve(subject, ListBlocks, silent)
    await worker.flush()
    with pytest.raises(RequestTimeout):
        await index.request(subject, ListBlocks(), Done, timeout_s=0.05)
    release.set()


async def test_served_requests_do_not_wait_for_each_other(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")
    arrived, everybody = 0, asyncio.Event()

    async def meet(message: ListBlocks) -> Done:
        nonlocal arrived
        arrived += 1
        if arrived == 20:
            everybody.set()
        await everybody.wait()
        return Done()

    await worker.serve(subject, ListBlocks, meet)
    await worker.flush()
    calls = [index.request(subject, ListBlocks(), Done, timeout_s=5) for _ in range(20)]
    assert await asyncio.gather(*calls) == [Done()] * 20


async def test_a_queue_group_answers_once(connect: Connect) -> None:
    gateway = await connect("gateway-1")
    taken: list[str] = []
    for process_id in ("scheduler-1", "scheduler-2"):
        scheduler = await connect(process_id)

        def note(message: CancelQueued, process_id: str = process_id) -> Done:
            taken.append(process_id)
            return Done()

        await scheduler.serve(subjects.SUBMIT, CancelQueued, note, queue=subjects.SCHEDULER_GROUP)
        await scheduler.flush()
    cancel = CancelQueued(request_id="r", gateway_id="gateway-1")
    for _ in range(40):
        await gateway.request(subjects.SUBMIT, cancel, Done, timeout_s=2)
    assert len(taken) == 40
    assert set(taken) == {"scheduler-1", "scheduler-2"}


async def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, max_payload_bytes=64 * 1024)
    try:
        bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
        assert bus.max_payload_bytes == 64 * 1024
        giant = AbortRequest(placement_id=b"x" * 70_000, reason="stop")
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subjects.control("decode", "decode-1"), giant)
        with pytest.raises(PayloadTooLarge):
            await bus.request(subjects.SUBMIT, giant, Done, timeout_s=1)
        await bus.flush()
        assert bus.is_connected
        await bus.close()
    finally:
        server.stop()


async def test_eight_mebibytes_pass(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")
    await decode.subscribe(subject, BlocksRemoved, inbox.take)
    await decode.flush()
    large = BlocksRemoved(block_hashes=bytes(8 * 1024 * 1024 - 100))
    await gateway.publish(subject, large)
    assert await inbox.next() == large


# ── permissions ──────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def plain_client(
    server: NatsServer, process_id: str
) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
    """A client with this process's credential and nothing of ours; what the server objects to."""
    errors: asyncio.Queue[str] = asyncio.Queue()

    async def on_error(error: Exception) -> None:
        errors.put_nowait(str(error).lower())

    client = await nats.connect(server.url(process_id), error_cb=on_error)
    yield client, errors
    await client.close()


def heard(subject: str) -> str:
    return subject if subject.startswith("_INBOX") else subjects.from_anyone(subject)


@pytest.mark.parametrize(
    ("process_id", "own", "foreign"),
    [
        ("gateway-1", "_INBOX.gateway-1.>", "_INBOX.gateway-2.>"),
        ("gateway-1", "_INBOX.gateway-1.x", "_INBOX.>"),
        ("gateway-1", subjects.tokens("gateway-1"), subjects.tokens("gateway-2")),
        ("gateway-1", subjects.placement("gateway-1"), subjects.placement("gateway-2")),
        ("decode-1", subjects.start_decode("decode-1"), subjects.start_decode("decode-2")),
        ("decode-1", subjects.control("decode", "decode-1"), "hearth.v1.decode.*.start"),
        ("prefill-1", subjects.run_prefill("prefill-1"), subjects.run_prefill("prefill-2")),
        ("prefill-1", subjects.HEARTBEATS, subjects.SUBMIT),
        ("scheduler-1", subjects.SUBMIT, subjects.cancel("scheduler-2")),
        ("kv_index-1", subjects.KV_EVENTS, "hearth.v1.*.*"),
        ("worker-1", subjects.start_decode("worker-1"), subjects.start_decode("worker-2")),
        ("worker-1", subjects.run_prefill("worker-1"), subjects.run_prefill("worker-2")),
    ],
)
async def test_a_process_listens_to_its_own_subjects_only(
    nats_server: NatsServer, process_id: str, own: str, foreign: str
) -> None:
    async with plain_client(nats_server, process_id) as (client, errors):
        await client.subscribe(heard(own))
        await client.subscribe(heard(foreign))
        refusal = await asyncio.wait_for(errors.get(), timeout=5)
        assert "permissions violation for subscription" in refusal
        assert f'"{heard(foreign)}"'.lower() in refusal  # and not `own`, which came first


@pytest.mark.parametrize(
    ("process_id", "own", "foreign"),
    [
        ("gateway-1", subjects.SUBMIT, subjects.start_decode("decode-1")),
        ("gateway-1", subjects.control("decode", "decode-1"), subjects.tokens("gateway-2")),
        ("decode-1", subjects.tokens("gateway-1"), subjects.placement("gateway-1")),
        (
            "decode-1",
            subjects.heartbeat("decode", "decode-1"),
            subjects.heartbeat("decode", "decode-2"),
        ),
        (
            "prefill-1",
            subjects.kv_events("prefill", "prefill-1"),
            subjects.kv_events("prefill", "prefill-2"),
        ),
        ("prefill-1", subjects.control("decode", "decode-1"), subjects.tokens("gateway-1")),
        ("scheduler-1", subjects.MATCH, "_INBOX.gateway-1.reply"),
        ("kv_index-1", subjects.list_blocks("prefill", "prefill-1"), subjects.SUBMIT),
        ("worker-1", subjects.kv_events("decode", "worker-1"), subjects.SUBMIT),
    ],
)
async def test_a_process_cannot_pose_as_another(
    nats_server: NatsServer, process_id: str, own: str, foreign: str
) -> None:
    async with plain_client(nats_server, process_id) as (client, errors):
        await client.publish(subjects.sent_by(own, process_id), b"")
        await client.publish(subjects.sent_by(foreign, process_id), b"")
        refusal = await asyncio.wait_for(errors.get(), timeout=5)
        assert "permissions violation for publish" in refusal
        assert f'"{foreign}.{process_id}"'.lower() in refusal  # and not `own`, which came first


# ── connection ───────────────────────────────────────────────────────────────────────────────────


async def test_a_wrong_password_or_no_server_is_one_clear_error(nats_server: NatsServer) -> None:
    wrong = nats_server.url("gateway-1").replace(":test@", ":guess@")
    for url in (wrong, "nats://gateway-1:guess@127.0.0.1:1"):
        with pytest.raises(DependencyUnavailable) as refused:
            await NatsBus.connect(url, process_id="gateway-1", timeout_s=1.0)
        assert "guess" not in refused.value.message
        assert "cannot reach NATS" in refused.value.message


def test_a_url_is_shown_without_its_password() -> None:
    assert without_password("nats://user:secret@host:4222/x?token=y") == "nats://host:4222/x"


async def test_subscriptions_survive_a_server_restart(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(server.stop)
        gateway = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
        stack.push_async_callback(gateway.close)
        decode = await NatsBus.connect(server.url("decode-1"), process_id="decode-1")
        stack.push_async_callback(decode.close)
        inbox, subject = Inbox(), subjects.control("decode", "decode-1")
        await decode.subscribe(subject, AbortRequest, inbox.take)
        await decode.flush()
        server.stop()
        await _until(lambda: not gateway.is_connected and not decode.is_connected)
        server.start()
        await _until(lambda: gateway.is_connected and decode.is_connected)
        await decode.flush()
        await gateway.publish(subject, ABORT)
        assert await inbox.next() == ABORT


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_closed_bus_says_so(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url("gateway-1"), process_id="gateway-1")
    await bus.close()
    with pytest.raises(DependencyUnavailable):
        await bus.publish(subjects.SUBMIT, ABORT)
    with pytest.raises(DependencyUnavailable):
        await bus.request(subjects.SUBMIT, ABORT, Done, timeout_s=0.2)


async def test_a_refused_credential_is_told_at_once(nats_server: NatsServer) -> None:
    scheme, rest = nats_server.url("kv_index-1").split("://")
    user, host = rest.split(":", 1)[0], rest.rsplit("@", 1)[1]
    with pytest.raises(DependencyUnavailable, match=r"(?i)authorization") as refused:
        async with asyncio.timeout(3):
            await NatsBus.connect(f"{scheme}://{user}:wrong-word@{host}", process_id=user)
    assert "wrong-word" not in refused.value.message


async def test_a_request_that_meets_a_leaving_server_is_answered_or_finds_nobody(
    connect: Connect,
) -> None:
    """It must not be lost between the server's forgetting and the process's."""
    gateway, decode = await connect("gateway-1"), await connect("decode-1")
    subject = subjects.resend("decode-1")
    for num_turns in range(40):
        leave = await decode.serve(subject, ListBlocks, lambda _: Done())
        await decode.flush()
        requests = [
            asyncio.ensure_future(gateway.request(subject, ListBlocks(), Done, timeout_s=2))
            for _ in range(5)
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)  # the requests are a little further on their way each time
        await leave()
        requests += [
            asyncio.ensure_future(gateway.request(subject, ListBlocks(), Done, timeout_s=2))
            for _ in range(5)
        ]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(each, Done | NoResponders) for each in outcomes), outcomes
        assert isinstance(outcomes[-1], NoResponders)
