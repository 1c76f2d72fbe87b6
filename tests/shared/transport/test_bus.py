"""The bus over a real nats-server with permissions for each process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import structlog
import uvloop
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
from shared.transport.bus import NatsBus, error_of, failure_of, reply_to
from shared.transport.rejected_messages import RejectedMessages
from tests.support.nats_clients import connect_ordered
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import LIMIT_S, until

Connect = Callable[[str], Awaitable[NatsBus]]
ABORT = AbortRequest(placement_id=b"p" * 16, reason="stop")
# Empty; not msgpack; text that is not UTF-8; an unknown field nested 100,000 deep.
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

    def receive(self, message: object) -> None:
        self.messages.put_nowait(message)

    async def next(self) -> object:
        return await asyncio.wait_for(self.messages.get(), timeout=LIMIT_S)


async def test_publish_arrives_in_order(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")
    unsubscribe = await decode.subscribe(subject, AbortRequest, inbox.receive)
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


async def test_invalid_message_does_not_end_subscription(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")

    def failing_handler(message: AbortRequest) -> None:
        if message.reason == "fenced":
            raise RuntimeError("a bug")
        inbox.receive(message)

    await decode.subscribe(subject, AbortRequest, failing_handler)
    await decode.flush()
    await gateway.publish(subject, ListBlocks())
    await gateway.publish(subject, AbortRequest(placement_id=bytes(16), reason="fenced"))
    for data in UNREADABLE_BYTES:
        await gateway._client.publish(subjects.sent_by(subject, "gateway-1"), data)
    await gateway.publish(subject, ABORT)
    assert await inbox.next() == ABORT


@pytest.mark.parametrize("data", UNREADABLE_BYTES)
async def test_unreadable_request_is_rejected_as_invalid(data: bytes) -> None:
    decode = msgspec.msgpack.Decoder(CancelQueued).decode
    reply = await reply_to("subject", lambda message: Done(), decode, data, RejectedMessages())
    assert isinstance(reply, Failure)
    assert (reply.code, reply.message[:19]) == ("invalid_request", "not a valid message")


@pytest.mark.parametrize("data", [each.replace(*AS_FAILURE) for each in UNREADABLE_BYTES])
async def test_unreadable_reply_raises_dependency_unavailable(
    connect: Connect, data: bytes
) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")

    async def send_reply(message: Msg) -> None:
        await message.respond(data)

    await worker._client.subscribe(subjects.from_anyone(subject), cb=send_reply)
    await worker.flush()
    with pytest.raises(DependencyUnavailable, match="invalid reply on"):
        await index.request(subject, ListBlocks(), Done, timeout_s=LIMIT_S)


async def test_client_raises_the_error_of_the_handler(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    errors: list[Exception] = [
        Overloaded("full", retry_after_s=2.5),
        InvalidRequest("no", param="cursor"),
        ValueError("a secret of the implementation"),
    ]

    async def fail(message: ListBlocks) -> Done:
        raise errors[message.cursor]

    subject = subjects.list_blocks("prefill", "prefill-1")
    await worker.serve(subject, ListBlocks, fail)
    await worker.flush()
    with pytest.raises(Overloaded, match="full") as overloaded:
        await index.request(subject, ListBlocks(cursor=0), Done, timeout_s=LIMIT_S)
    assert overloaded.value.retry_after_s == 2.5
    with pytest.raises(InvalidRequest) as invalid:
        await index.request(subject, ListBlocks(cursor=1), Done, timeout_s=LIMIT_S)
    assert invalid.value.param == "cursor"
    with pytest.raises(HearthError, match=r"^internal error$") as internal:
        await index.request(subject, ListBlocks(cursor=2), Done, timeout_s=LIMIT_S)
    assert internal.value.code == "internal_error"
    with pytest.raises(InvalidRequest, match="not a valid message"):
        await index.request(subject, ABORT, Done, timeout_s=LIMIT_S)


def test_every_error_round_trips() -> None:
    def tree(root: type[HearthError]) -> list[type[HearthError]]:
        children = [each for child in root.__subclasses__() for each in tree(child)]
        return [root, *children] if root.__module__ == "shared.errors" else []

    for error_class in tree(HearthError):
        error = error_class("why", param="field", retry_after_s=0.0)
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(failure_of(error)), type=Failure)
        decoded = error_of(wire)
        assert type(decoded) is error_class
        assert (decoded.message, decoded.param, decoded.retry_after_s) == ("why", "field", 0.0)
    assert type(error_of(Failure(code="of a newer version", message="?"))) is HearthError


async def test_request_without_responder_or_reply_raises(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")
    with pytest.raises(NoResponders):
        await index.request(subject, ListBlocks(), Done, timeout_s=LIMIT_S)
    release = asyncio.Event()

    async def wait_for_release(message: ListBlocks) -> Done:
        await release.wait()
        return Done()

    await worker.serve(subject, ListBlocks, wait_for_release)
    await worker.flush()
    with pytest.raises(RequestTimeout):
        await index.request(subject, ListBlocks(), Done, timeout_s=0.05)
    release.set()


async def test_requests_are_served_concurrently(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")
    arrived, all_arrived = 0, asyncio.Event()

    async def wait_for_all(message: ListBlocks) -> Done:
        nonlocal arrived
        arrived += 1
        if arrived == 20:
            all_arrived.set()
        await all_arrived.wait()
        return Done()

    await worker.serve(subject, ListBlocks, wait_for_all)
    await worker.flush()
    calls = [index.request(subject, ListBlocks(), Done, timeout_s=LIMIT_S) for _ in range(20)]
    assert await asyncio.gather(*calls) == [Done()] * 20


async def test_request_reaches_one_member_of_queue_group(connect: Connect) -> None:
    gateway = await connect("gateway-1")
    served_by: list[str] = []
    for process_id in ("scheduler-1", "scheduler-2"):
        scheduler = await connect(process_id)

        def record(message: CancelQueued, process_id: str = process_id) -> Done:
            served_by.append(process_id)
            return Done()

        await scheduler.serve(subjects.SUBMIT, CancelQueued, record, queue=subjects.SCHEDULER_GROUP)
        await scheduler.flush()
    cancel = CancelQueued(request_id="r", gateway_id="gateway-1")
    for _ in range(40):
        await gateway.request(subjects.SUBMIT, cancel, Done, timeout_s=LIMIT_S)
    assert len(served_by) == 40
    assert set(served_by) == {"scheduler-1", "scheduler-2"}


async def test_too_large_message_is_rejected_before_sending(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, max_payload_bytes=64 * 1024)
    try:
        bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
        assert bus.max_payload_bytes == 64 * 1024
        too_large = AbortRequest(placement_id=b"x" * 70_000, reason="stop")
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subjects.control("decode", "decode-1"), too_large)
        with pytest.raises(PayloadTooLarge):
            await bus.request(subjects.SUBMIT, too_large, Done, timeout_s=LIMIT_S)
        await bus.flush()
        assert bus.is_connected
        await bus.close()
    finally:
        server.stop()


async def test_message_of_8_mib_is_delivered(connect: Connect) -> None:
    gateway, decode, inbox = await connect("gateway-1"), await connect("decode-1"), Inbox()
    subject = subjects.control("decode", "decode-1")
    await decode.subscribe(subject, BlocksRemoved, inbox.receive)
    await decode.flush()
    large = BlocksRemoved(block_hashes=bytes(8 * 1024 * 1024 - 100))
    await gateway.publish(subject, large)
    assert await inbox.next() == large


# ── permissions ──────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def raw_client(
    server: NatsServer, process_id: str
) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
    """A nats-py client with the credential of the process, and the errors from the server.
    `gateway-1.api`: that gateway among the API clients.
    """
    errors: asyncio.Queue[str] = asyncio.Queue()

    async def on_error(error: Exception) -> None:
        errors.put_nowait(str(error).lower())

    name, dot, _ = process_id.partition(".api")
    url = server.api_url(name) if dot else server.url(process_id)
    client = await connect_ordered(url, error_cb=on_error)
    try:
        yield client, errors
    finally:
        await client.close()


def subscribed_subject(subject: str) -> str:
    return subject if subject.startswith("_INBOX") else subjects.from_anyone(subject)


@pytest.mark.parametrize(
    ("process_id", "own", "foreign"),
    [
        ("gateway-1", "_INBOX.gateway-1.*.>", "_INBOX.gateway-2.*.>"),
        ("gateway-1", "_INBOX.gateway-1.-.x", "_INBOX.>"),
        ("gateway-1", subjects.tokens("gateway-1"), subjects.tokens("gateway-2")),
        ("gateway-1", subjects.placement("gateway-1"), subjects.placement("gateway-2")),
        ("decode-1", subjects.start_decode("decode-1"), subjects.start_decode("decode-2")),
        ("decode-1", subjects.control("decode", "decode-1"), "hearth.v1.decode.*.*.start"),
        ("prefill-1", subjects.run_prefill("prefill-1"), subjects.run_prefill("prefill-2")),
        ("prefill-1", subjects.HEARTBEATS, subjects.SUBMIT),
        ("scheduler-1", subjects.SUBMIT, subjects.cancel("scheduler-2")),
        ("kv_index-1", subjects.KV_EVENTS, "hearth.v1.*.*.*"),
        ("worker-1", subjects.start_decode("worker-1"), subjects.start_decode("worker-2")),
        ("worker-1", subjects.run_prefill("worker-1"), subjects.run_prefill("worker-2")),
        ("decode-1.a", subjects.start_decode("decode-1.b"), subjects.start_decode("decode-2.a")),
        ("gateway-1.a", "_INBOX.gateway-1.a.>", "_INBOX.gateway-2.a.>"),
    ],
)
async def test_process_subscribes_only_to_its_own_subjects(
    nats_server: NatsServer, process_id: str, own: str, foreign: str
) -> None:
    async with raw_client(nats_server, process_id) as (client, errors):
        await client.subscribe(subscribed_subject(own))
        await client.subscribe(subscribed_subject(foreign))
        violation = await asyncio.wait_for(errors.get(), timeout=LIMIT_S)
        assert "permissions violation for subscription" in violation
        assert f'"{subscribed_subject(foreign)}"'.lower() in violation  # not `own`, which was first


@pytest.mark.parametrize(
    ("process_id", "own", "foreign"),
    [
        ("gateway-1", subjects.SUBMIT, subjects.start_decode("decode-1")),
        ("gateway-1", subjects.control("decode", "decode-1"), subjects.tokens("gateway-2")),
        ("decode-1", subjects.tokens("gateway-1"), subjects.placement("gateway-1")),
        (
            "decode-1",
            subjects.heartbeat(("decode",), "decode-1"),
            subjects.heartbeat(("decode",), "decode-2"),
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
        # a replica: the instance is free, the credential is not
        ("decode-1.a", subjects.tokens("gateway-1.b"), subjects.start_decode("decode-1.b")),
        (
            "decode-1.a",
            subjects.heartbeat(("decode",), "decode-1.a"),
            subjects.heartbeat(("decode",), "decode-2.a"),
        ),
        (
            "decode-1.a",
            subjects.heartbeat(("decode",), "decode-1.a"),
            subjects.heartbeat(("decode",), "decode-1.a", "eu"),
        ),
    ],
)
async def test_process_publishes_only_to_its_own_subjects(
    nats_server: NatsServer, process_id: str, own: str, foreign: str
) -> None:
    async with raw_client(nats_server, process_id) as (client, errors):
        await client.publish(subjects.sent_by(own, process_id), b"")
        await client.publish(subjects.sent_by(foreign, process_id), b"")
        violation = await asyncio.wait_for(errors.get(), timeout=LIMIT_S)
        assert "permissions violation for publish" in violation
        foreign_on_wire = subjects.sent_by(foreign, process_id)
        assert f'"{foreign_on_wire}"'.lower() in violation  # not `own`, which was first


# ── connection ───────────────────────────────────────────────────────────────────────────────────


async def test_failed_connect_raises_error_without_password(nats_server: NatsServer) -> None:
    wrong = nats_server.url("gateway-1").replace(":test@", ":guess@")
    for url in (wrong, "nats://gateway-1:guess@127.0.0.1:1"):
        with pytest.raises(DependencyUnavailable) as raised:
            await NatsBus.connect(url, process_id="gateway-1", timeout_s=0.3)
        assert "guess" not in raised.value.message
        assert "cannot reach NATS" in raised.value.message


async def test_late_reply_is_handed_over_after_the_timeout(connect: Connect) -> None:
    gateway, decode = await connect("gateway-1"), await connect("decode-1")
    subject, late = subjects.resend("decode-1"), Inbox()
    is_answering = asyncio.Event()

    async def answer(_: ListBlocks) -> Done:
        await is_answering.wait()
        return Done()

    await decode.serve(subject, ListBlocks, answer)
    await decode.flush()
    with pytest.raises(RequestTimeout):
        await gateway.request(subject, ListBlocks(), Done, timeout_s=0.05, on_late=late.receive)
    is_answering.set()
    assert await late.next() == Done()
    is_answering.clear()
    with pytest.raises(RequestTimeout):
        await gateway.request(subject, ListBlocks(), Done, timeout_s=0.05, on_late=late.receive)
    assert await late.next() is None
    assert not gateway._client._replies


async def test_second_server_of_a_cluster_serves_when_the_first_is_down(tmp_path: Path) -> None:
    first_port, second_port = free_port(), free_port()
    async with AsyncExitStack() as stack:
        first = NatsServer(tmp_path, more_config=_cluster(first_port, second_port))
        stack.callback(first.stop)
        second = NatsServer(tmp_path, more_config=_cluster(second_port, first_port))
        stack.callback(second.stop)

        async def connected(process_id: str, servers: list[NatsServer]) -> NatsBus:
            near, far = servers
            url = f"{near.url(process_id)},nats://127.0.0.1:{far.port}"
            bus = await NatsBus.connect(url, process_id=process_id)
            stack.push_async_callback(bus.close)
            return bus

        before = await connected("gateway-1", [first, second])
        other = await connected("decode-1", [second, first])
        inbox, subject = Inbox(), subjects.control("decode", "decode-1")
        await other.subscribe(subject, AbortRequest, inbox.receive)
        await other.flush()
        assert before._client.connected_url.port == first.port
        assert other._client.connected_url.port == second.port
        first.stop()
        after = await connected("gateway-2", [first, second])  # its first seed is down
        await _until(lambda: before.num_reconnects == 1 and before.is_connected)
        for bus in (before, after):
            await bus.publish(subject, ABORT)
            assert await inbox.next() == ABORT


@asynccontextmanager
async def ending_first(server: NatsServer) -> AsyncIterator[int]:
    """Yields a port of the server that ends its first connection as soon as it is accepted, like a
    server that reads its configuration again.
    """
    ended = list[str]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def forth() -> None:
            while data := await reader.read(65_536):
                far_writer.write(data)

        forwarding = asyncio.create_task(forth())
        while data := await far_reader.read(65_536):
            writer.write(data)
            if not ended and b"PONG" in data:
                ended.append("first")
                break
        writer.close()
        far_writer.close()
        forwarding.cancel()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as relaying:
        yield relaying.sockets[0].getsockname()[1]
        assert ended


async def test_connects_again_when_the_server_ends_the_connection_at_once(
    nats_server: NatsServer,
) -> None:
    async with ending_first(nats_server) as port:
        url = nats_server.url("decode-1").replace(str(nats_server.port), str(port))
        bus = await NatsBus.connect(url, process_id="decode-1", timeout_s=LIMIT_S)
        try:
            await until(lambda: bus.is_connected)
            await bus.flush()
        finally:
            await bus.close()


async def test_reply_to_a_request_of_an_earlier_connection_is_not_sent(connect: Connect) -> None:
    """The server lets nobody send it, and logs a violation. The end in order is no warning."""
    gateway, decode = await connect("gateway-1"), await connect("decode-1")
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(_: AbortRequest) -> Done:
        is_asked.set()
        await may_answer.wait()
        return Done()

    subject = subjects.control("decode", "decode-1")
    await decode.serve(subject, AbortRequest, answer)
    await decode.flush()
    asking = asyncio.create_task(gateway.request(subject, ABORT, Done, timeout_s=60))
    await is_asked.wait()
    with structlog.testing.capture_logs() as logs:
        decode._client._transport.close()
        await _until(lambda: decode.num_reconnects == 1 and decode.is_connected)
        may_answer.set()
        await _until(lambda: not len(decode._serving))
        await decode.flush()
        await decode.close()
    asking.cancel()
    assert not [each for each in logs if "ermissions" in each.get("error", "")]
    assert [each["event"] for each in logs].count("nats_disconnected") == 1


def test_close_after_the_loss_of_the_server_raises_nothing(tmp_path: Path) -> None:
    """uvloop raises for writing to a closed transport."""

    async def scenario() -> None:
        server = NatsServer(tmp_path, (("gateway", "gateway-1"),))
        bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
        server.stop()
        await until(lambda: not bus.is_connected)
        await bus.publish(subjects.control("decode", "decode-1"), ABORT)
        await bus.close()

    uvloop.run(scenario())


def _cluster(own_port: int, other_port: int) -> str:
    return (
        f'cluster {{\n  name: "sites"\n  listen: "127.0.0.1:{own_port}"\n'
        f'  routes: ["nats-route://127.0.0.1:{other_port}"]\n}}\n'
    )


async def test_subscriptions_survive_a_server_restart(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(server.stop)
        gateway = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
        stack.push_async_callback(gateway.close)
        decode = await NatsBus.connect(server.url("decode-1"), process_id="decode-1")
        stack.push_async_callback(decode.close)
        inbox, subject = Inbox(), subjects.control("decode", "decode-1")
        await decode.subscribe(subject, AbortRequest, inbox.receive)
        await decode.flush()
        server.stop()
        await _until(lambda: not gateway.is_connected and not decode.is_connected)
        server.start()
        await _until(lambda: gateway.is_connected and decode.is_connected)
        await decode.flush()
        await gateway.publish(subject, ABORT)
        assert await inbox.next() == ABORT


async def _until(is_true: Callable[[], bool]) -> None:
    await until(lambda: is_true())


async def test_closed_bus_raises_dependency_unavailable(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url("gateway-1"), process_id="gateway-1")
    await bus.close()
    with pytest.raises(DependencyUnavailable):
        await bus.publish(subjects.SUBMIT, ABORT)
    with pytest.raises(DependencyUnavailable):
        await bus.request(subjects.SUBMIT, ABORT, Done, timeout_s=0.2)


async def test_rejected_credential_raises_before_timeout(nats_server: NatsServer) -> None:
    scheme, rest = nats_server.url("kv_index-1").split("://")
    user, host = rest.split(":", 1)[0], rest.rsplit("@", 1)[1]
    with pytest.raises(DependencyUnavailable, match=r"(?i)authorization") as raised:
        async with asyncio.timeout(LIMIT_S / 2):
            url = f"{scheme}://{user}:wrong-word@{host}"
            await NatsBus.connect(url, process_id=user, timeout_s=LIMIT_S)
    assert "wrong-word" not in raised.value.message


async def test_request_during_unsubscribe_gets_reply_or_no_responders(
    connect: Connect,
) -> None:
    """No request is lost between the unsubscription at the server and in the process."""
    gateway, decode = await connect("gateway-1"), await connect("decode-1")
    subject = subjects.resend("decode-1")
    for num_turns in range(40):
        stop_serving = await decode.serve(subject, ListBlocks, lambda _: Done())
        await decode.flush()
        requests = [
            asyncio.ensure_future(gateway.request(subject, ListBlocks(), Done, timeout_s=LIMIT_S))
            for _ in range(5)
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)  # the requests progress further in each round
        await stop_serving()
        requests += [
            asyncio.ensure_future(gateway.request(subject, ListBlocks(), Done, timeout_s=LIMIT_S))
            for _ in range(5)
        ]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(each, Done | NoResponders) for each in outcomes), outcomes
        assert isinstance(outcomes[-1], NoResponders)


@pytest.mark.parametrize("is_async", [False, True])
async def test_reply_that_cannot_be_sent_is_a_failure(connect: Connect, is_async: bool) -> None:
    gateway, scheduler = await connect("gateway-1"), await connect("scheduler-1")
    replies = iter([ListBlocks(cursor=2**64), BlocksRemoved(block_hashes=bytes(9 << 20)), Done()])

    async def later(message: CancelQueued) -> object:
        return next(replies)

    handler = later if is_async else lambda message: next(replies)
    await scheduler.serve(subjects.SUBMIT, CancelQueued, handler)
    await scheduler.flush()
    cancel = CancelQueued(request_id="r", gateway_id="gateway-1")
    for error in (HearthError, PayloadTooLarge):
        with pytest.raises(error):
            await gateway.request(subjects.SUBMIT, cancel, Done, timeout_s=LIMIT_S)
    assert await gateway.request(subjects.SUBMIT, cancel, Done, timeout_s=LIMIT_S) == Done()
