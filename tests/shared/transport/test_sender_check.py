"""A message must name its true sender, which the server enforces in the subject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from shared import subjects
from shared.clock import MonotonicClock
from shared.errors import DependencyUnavailable, SenderMismatch
from shared.kv_layout import KvShard
from shared.lifecycle.health import Loss
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    BlockPage,
    CancelQueued,
    DataPlaneAddress,
    Done,
    Failure,
    Heartbeat,
    KvEvents,
    KvTarget,
    ListBlocks,
    Message,
    PlacementFailed,
    PrefillFailed,
    QueueKeepalive,
    RenewLease,
    ResendTokens,
    RunPrefill,
    TokenBatch,
)
from shared.numerics import Numerics
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.services.scheduler.literals import submit_of
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

Connect = Callable[[str], Awaitable[NatsBus]]
ID = b"p" * 16
CACHE = {"model": "m", "revision": "r", "kv_format": "f", "epoch": 1, "sequence_number": 1}
GATEWAYS_MESSAGES = (
    *("CancelQueued", "SubmitRequest", "FleetRead", "SiteState", "SiteModels", "PrefixDigest"),
    *("ReadTenantCopies", "TenantCopies", "LeaseLimits", "LimitsLeased", "ReportUsage"),
    *("WithdrawTenant", "ReadReceipt", "ReadTenantKv", "KvElsewhere"),
)
FAILURE = Failure(code="worker_busy", message="no")


def heartbeat(process_id: str, **changed: Any) -> Heartbeat:
    beat = Heartbeat(
        process_id=process_id,
        epoch=1,
        sequence_number=1,
        roles=("decode",),
        state="ready",
        interval_s=0.25,
    )
    return msgspec.structs.replace(beat, **changed)


def run_prefill(decode_worker_id: str) -> RunPrefill:
    return RunPrefill(
        request_id="r",
        placement_id=ID,
        tenant_id="t",
        decode_worker_id=decode_worker_id,
        model="m",
        revision="r",
        kv_format="f",
        cache_root=bytes(16),
        token_ids=b"",
        block_hashes=b"",
        first_token=0,
        targets=(
            KvTarget(
                shard=KvShard(0, 1, 0, 1),
                address=DataPlaneAddress(host="h", port=1, unix_path="", instance_id=b"i"),
            ),
        ),
        lease_s=1.0,
        deadline_s=1.0,
        numerics=Numerics("exact", "timing", "uint8", "1"),
    )


# Receiver, its subscription, sender, subject, and the message that names a given process id.
PUBLISHED: list[tuple[str, str, str, str, Callable[[str], Message]]] = [
    (
        "gateway-1",
        subjects.HEARTBEATS,
        "decode-1",
        subjects.heartbeat(("decode",), "decode-1"),
        heartbeat,
    ),
    (
        "gateway-1",
        subjects.HEARTBEATS,
        "decode-1",
        subjects.heartbeat(("decode",), "decode-1"),
        lambda name: heartbeat(name, state="stopped"),
    ),
    (
        "kv_index-1",
        subjects.KV_EVENTS,
        "prefill-1",
        subjects.kv_events("prefill", "prefill-1"),
        lambda name: KvEvents(worker_id=name, events=(), **CACHE),
    ),
    (
        "gateway-1",
        subjects.tokens("gateway-1"),
        "decode-1",
        subjects.tokens("gateway-1"),
        lambda name: TokenBatch(worker_id=name, entries=()),
    ),
    (
        "gateway-1",
        subjects.placement("gateway-1"),
        "scheduler-1",
        subjects.placement("gateway-1"),
        lambda name: QueueKeepalive(scheduler_id=name, request_ids=()),
    ),
    (
        "gateway-1",
        subjects.placement("gateway-1"),
        "scheduler-1",
        subjects.placement("gateway-1"),
        lambda name: PlacementFailed(request_id="r", scheduler_id=name, attempt=1, failure=FAILURE),
    ),
    (
        "scheduler-1",
        subjects.cancel("scheduler-1"),
        "gateway-1",
        subjects.cancel("scheduler-1"),
        lambda name: CancelQueued(request_id="r", gateway_id=name),
    ),
    (
        "prefill-1",
        subjects.control("prefill", "prefill-1"),
        "decode-1",
        subjects.control("prefill", "prefill-1"),
        lambda name: RenewLease(decode_worker_id=name, placement_ids=(), lease_s=1.0),
    ),
    (
        "decode-1",
        subjects.control("decode", "decode-1"),
        "prefill-1",
        subjects.control("decode", "decode-1"),
        lambda name: PrefillFailed(placement_id=ID, prefill_worker_id=name, failure=FAILURE),
    ),
]
REQUESTED: list[tuple[str, str, str, Callable[[str], Message]]] = [
    ("scheduler-1", subjects.SUBMIT, "gateway-1", lambda name: submit_of("r", gateway_id=name)),
    ("prefill-1", subjects.run_prefill("prefill-1"), "decode-1", run_prefill),
]


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connected(process_id: str) -> NatsBus:
            bus = await NatsBus.connect(nats_server.url(process_id), process_id=process_id)
            stack.push_async_callback(bus.close)
            return bus

        yield connected


@pytest.mark.parametrize(("receiver", "subscription", "sender", "subject", "make"), PUBLISHED)
async def test_message_with_wrong_sender_is_dropped_and_counted(
    connect: Connect,
    receiver: str,
    subscription: str,
    sender: str,
    subject: str,
    make: Callable[[str], Message],
) -> None:
    receiving, sending = await connect(receiver), await connect(sender)
    received: asyncio.Queue[Message] = asyncio.Queue()
    await receiving.subscribe(subscription, type(make(sender)), received.put_nowait)
    await receiving.flush()
    await sending.publish(subject, make("another"))
    await sending.publish(subject, make(sender))
    assert await asyncio.wait_for(received.get(), LIMIT_S) == make(sender)
    assert (received.qsize(), receiving.num_sender_mismatches) == (0, 1)


@pytest.mark.parametrize(("server", "subject", "client", "make"), REQUESTED)
async def test_request_with_wrong_sender_is_rejected_and_counted(
    connect: Connect, server: str, subject: str, client: str, make: Callable[[str], Message]
) -> None:
    serving, requesting = await connect(server), await connect(client)
    served: list[Message] = []

    def serve(message: Message) -> Done:
        served.append(message)
        return Done()

    await serving.serve(subject, type(make(client)), serve)
    await serving.flush()
    with pytest.raises(SenderMismatch, match="that names another"):
        await requesting.request(subject, make("another"), Done, timeout_s=LIMIT_S)
    await requesting.request(subject, make(client), Done, timeout_s=LIMIT_S)
    assert served == [make(client)]
    assert serving.num_sender_mismatches == 1


async def test_reply_with_wrong_sender_is_invalid(connect: Connect) -> None:
    index, worker = await connect("kv_index-1"), await connect("prefill-1")
    subject = subjects.list_blocks("prefill", "prefill-1")
    page = BlockPage(worker_id="prefill-2", stored=(), **CACHE)
    await worker.serve(subject, ListBlocks, lambda _: page)
    await worker.flush()
    with pytest.raises(DependencyUnavailable, match="that names prefill-2"):
        await index.request(subject, ListBlocks(), BlockPage, timeout_s=LIMIT_S)
    assert index.num_sender_mismatches == 1


async def test_stopped_heartbeat_with_wrong_sender_is_ignored(connect: Connect) -> None:
    """A process with a valid credential reports that another process has stopped."""
    watching, hostile, good = (
        await connect("gateway-1"),
        await connect("decode-2"),
        await connect("decode-1"),
    )
    lost: list[tuple[str, Loss]] = []
    watcher = HealthMonitor(watching, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    watcher.on_lost(lambda process_id, loss: lost.append((process_id, loss)))
    await watcher.start()
    await watching.flush()
    health_monitor = HealthMonitor(good, MonotonicClock(), SystemRandomness(), roles=("decode",))
    await health_monitor.start()
    await health_monitor.transition_to("ready")
    subject = subjects.heartbeat(("decode",), "decode-2")
    await hostile.publish(
        subject, heartbeat("decode-1", epoch=health_monitor.epoch, state="stopped")
    )
    await until(
        lambda: watching.num_sender_mismatches and watcher.fleet.is_live("decode-1"),
        poll_s=0,
    )
    assert lost == []
    await watcher.stop()
    await health_monitor.stop()


async def test_server_rejects_subject_with_wrong_sender(connect: Connect) -> None:
    """A sender cannot bypass the check with another process id at the end of the subject."""
    receiving, hostile, good = (
        await connect("gateway-1"),
        await connect("decode-2"),
        await connect("decode-1"),
    )
    received: asyncio.Queue[TokenBatch] = asyncio.Queue()
    subject = subjects.tokens("gateway-1")
    await receiving.subscribe(subject, TokenBatch, received.put_nowait)
    await receiving.flush()
    batch = TokenBatch(worker_id="decode-1", entries=())
    forged_subject = subjects.sent_by(subject, "decode-1")
    await hostile._client.publish(forged_subject, msgspec.msgpack.encode(batch))
    await hostile.flush()
    await good.publish(subject, batch)
    await asyncio.wait_for(received.get(), LIMIT_S)
    await receiving.flush()
    assert received.empty()


def test_every_message_that_names_its_sender_is_checked() -> None:
    """A message type with a process id overrides `sender_id` if that id is its sender's."""
    named = {"worker_id", "scheduler_id", "process_id", "decode_worker_id", "prefill_worker_id"}
    others = {"Placed", "PrefixMatch", "Served"}  # they name a process that is not their sender
    for kind in Message.__subclasses__():
        names_sender = bool(named & set(kind.__struct_fields__)) and kind.__name__ not in others
        is_checked = kind.sender_id is not Message.sender_id
        of_gateway = kind.__name__ in GATEWAYS_MESSAGES
        assert is_checked is (names_sender or of_gateway), kind.__name__
    assert ResendTokens.sender_id is Message.sender_id
