"""Region classes on a real nats-server: it refuses what a process with a bug would send or receive.

Each process here is in `us`, outside of the class, and its own check is switched off: its classes
are wrong. The server knows the right ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

import msgspec
import pytest

from shared import subjects
from shared.errors import OutsideRegions
from shared.messages import (
    Done,
    EncodeImage,
    FetchPixels,
    KvEvents,
    ListBlocks,
    MatchPrefix,
    Message,
    PinPrefix,
    Queued,
    ResendTokens,
    RunPrefill,
    StartDecode,
    SubmitRequest,
    TokenBatch,
)
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import RegionClasses, region_classes
from shared.subjects import CredentialRole
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser
from tests.services.scheduler.literals import submit_of
from tests.shared.test_messages import RUN_PREFILL
from tests.support.servers import PASSWORD, NatsServer
from tests.support.waiting import until

CLASSES, TOO_WIDE = region_classes(["eu=fr,de"]), region_classes(["eu=fr,de,us"])
ROLES: tuple[CredentialRole, ...] = (
    *("gateway", "scheduler", "kv_index", "decode", "prefill", "worker", "host"),
)
SUBMIT = msgspec.structs.replace(
    submit_of("r", gateway_id="gateway-us"),
    request=msgspec.structs.replace(
        submit_of("r", gateway_id="gateway-us").request, region_class="eu"
    ),
)
MATCH = MatchPrefix(
    tenant_id="t", model="m", revision="r", block_hashes=b"h" * 16, region_class="eu"
)
RESEND = ResendTokens(placement_id=b"p" * 16, choice_index=0, from_position=0, region_class="eu")
PIN = PinPrefix(
    tenant_id="t", model="m", revision="r", cache_root=bytes(16), token_ids=b"",
    block_hashes=b"", lease_s=1.0, region_class="eu",
)  # fmt: skip


def tokens_of(worker_id: str) -> TokenBatch:
    return TokenBatch(worker_id=worker_id, entries=(), region_class="eu")


def events_of(worker_id: str) -> KvEvents:
    return KvEvents(
        worker_id=worker_id, epoch=1, sequence_number=1, model="m", revision="r",
        kv_format="k", events=(), region_class="eu",
    )  # fmt: skip


_OF_IMAGES = (
    *("tenant_id", "request_id", "image_hash", "transfer_id", "target"),
    *("deadline_s", "region_class"),
)


def sent_by(role: CredentialRole) -> list[tuple[str, Message]]:
    """What a process of the role sends with data of tenants."""
    name = f"{role}-us"
    start = StartDecode(placement_id=b"p" * 16, request=SUBMIT.request)
    prefill = msgspec.structs.replace(RUN_PREFILL, decode_worker_id=name, region_class="eu")
    pixels = FetchPixels(
        worker_id=name,
        tenant_id="t",
        request_id="r",
        image_hash=bytes(16),
        shape=(1,),
        transfer_id=bytes(16),
        target=RUN_PREFILL.targets[0].address,
        deadline_s=1.0,
        region_class="eu",
    )
    encode = EncodeImage(
        worker_id=name,
        encoder="k",
        gateway_id="gateway-fr",
        cache_root=bytes(16),
        lease_s=1.0,
        grid=(0, 0),
        **{each: getattr(pixels, each) for each in _OF_IMAGES},
    )
    handoffs = [
        (subjects.encode("encode-fr"), encode),
        (subjects.pixels("gateway-fr"), pixels),
        (subjects.run_prefill("prefill-fr"), prefill),
        (subjects.tokens("gateway-fr"), tokens_of(name)),
        (subjects.kv_events("decode", name), events_of(name)),
    ]
    return {
        "gateway": [
            (subjects.SUBMIT, SUBMIT),
            (subjects.submit_to("scheduler-fr"), SUBMIT),
            (subjects.MATCH, MATCH),
            (subjects.resend("decode-fr"), RESEND),
        ],
        "scheduler": [(subjects.MATCH, MATCH), (subjects.start_decode("decode-fr"), start)],
        "kv_index": [
            (subjects.list_blocks("decode", "decode-fr"), ListBlocks(region_class="eu")),
            (subjects.pins("decode", "decode-fr"), PIN),
        ],
        "decode": handoffs,
        "prefill": [
            (subjects.kv_events("prefill", name), events_of(name)),
            (subjects.encode("encode-fr"), encode),
        ],
        "encode": [(subjects.pixels("gateway-fr"), pixels)],
        "worker": handoffs,
        "host": [(subjects.start_decode("decode-fr"), start)],
    }[role]


RECEIVED_BY: dict[CredentialRole, list[tuple[str, Any]]] = {
    "gateway": [
        (subjects.tokens("gateway-us"), TokenBatch),
        (subjects.pixels("gateway-us"), FetchPixels),
    ],
    "scheduler": [
        (subjects.SUBMIT, SubmitRequest),
        (subjects.submit_to("scheduler-us"), SubmitRequest),
    ],
    "kv_index": [(subjects.MATCH, MatchPrefix), (subjects.KV_EVENTS, KvEvents)],
    "decode": [
        (subjects.start_decode("decode-us"), StartDecode),
        (subjects.resend("decode-us"), ResendTokens),
    ],
    "prefill": [
        (subjects.run_prefill("prefill-us"), RunPrefill),
        (subjects.encode("prefill-us"), EncodeImage),
    ],
    "encode": [(subjects.encode("encode-us"), EncodeImage)],
    "worker": [
        (subjects.start_decode("worker-us"), StartDecode),
        (subjects.pins("prefill", "worker-us"), PinPrefix),
        (subjects.list_blocks("decode", "worker-us"), ListBlocks),
    ],
    "host": [(subjects.KV_EVENTS, KvEvents)],
}


class Connect(Protocol):
    async def __call__(self, name: str, region: str, classes: RegionClasses) -> NatsBus: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [
        NatsUser(role, f"{role}-{region}", PASSWORD, region)
        for role in ROLES
        for region in ("fr", "us", "")
    ]
    started = NatsServer(tmp_path_factory.mktemp("nats"), users, classes=CLASSES)
    yield started
    started.stop()


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connected(name: str, region: str, classes: RegionClasses) -> NatsBus:
            bus = await NatsBus.connect(
                server.url(name), process_id=name, regions=RegionCheck(region, classes)
            )
            stack.push_async_callback(bus.close)
            return bus

        yield connected


@pytest.mark.parametrize("role", ROLES)
async def test_server_refuses_what_a_process_without_its_check_does(
    connect: Connect, role: CredentialRole
) -> None:
    bus = await connect(f"{role}-us", "us", TOO_WIDE)
    denied: list[str] = []
    bus.regions.on_denied = denied.append
    for subject, message in sent_by(role):
        with pytest.raises(OutsideRegions, match="NATS does not let"):
            await bus.request(subject, message, Done, timeout_s=60)
    num_sent = len(sent_by(role))
    assert bus.regions.num_denied == num_sent
    for subject, kind in RECEIVED_BY[role]:
        await bus.subscribe(subject, kind, lambda _: None)
    num_all = num_sent + len(RECEIVED_BY[role])
    await until(lambda: bus.regions.num_denied >= num_all, seen=lambda: list(denied))
    assert bus.regions.num_denied == num_all and bus.regions.num_refused == 0
    assert denied == ["eu"] * num_all


@pytest.mark.parametrize("role", ROLES)
async def test_process_refuses_first(connect: Connect, role: CredentialRole) -> None:
    for region in ("us", ""):
        bus = await connect(f"{role}-{region}", region, CLASSES)
        refused: list[str] = []
        bus.regions.on_refused = refused.append
        for subject, message in sent_by(role):
            with pytest.raises(OutsideRegions, match="outside of 'eu'"):
                await bus.publish(subject, message)
        assert bus.regions.num_refused == len(refused) == len(sent_by(role))
        assert bus.regions.num_denied == 0


async def test_data_of_a_class_reaches_its_regions_alone(connect: Connect) -> None:
    """The group of schedulers has two members; the one outside never sees a request."""
    seen: dict[str, list[str]] = {"fr": [], "us": []}
    for region in seen:
        scheduler = await connect(f"scheduler-{region}", region, CLASSES)

        def serve(message: SubmitRequest, region: str = region) -> Queued:
            seen[region].append(message.request.region_class)
            return Queued(scheduler_id=f"scheduler-{region}", num_ahead=0)

        await scheduler.serve(subjects.SUBMIT, SubmitRequest, serve, queue=subjects.SCHEDULER_GROUP)
        await scheduler.flush()
    gateway = await connect("gateway-fr", "fr", CLASSES)
    own = msgspec.structs.replace(SUBMIT.request, gateway_id="gateway-fr")
    plain = msgspec.structs.replace(own, region_class="")
    for request in (own, plain) * 8:
        submit = msgspec.structs.replace(SUBMIT, request=request)
        await gateway.request(subjects.SUBMIT, submit, Queued, timeout_s=60)
    assert seen["fr"].count("eu") == 8 and "eu" not in seen["us"]
    assert len(seen["fr"]) + len(seen["us"]) == 16


async def test_message_must_belong_to_the_class_of_its_subject(connect: Connect) -> None:
    """A prompt of a class on a subject without one would pass the server."""
    scheduler = await connect("scheduler-fr", "fr", CLASSES)
    taken: list[SubmitRequest] = []

    def take(message: SubmitRequest) -> Queued:
        taken.append(message)
        return Queued(scheduler_id="scheduler-fr", num_ahead=0)

    await scheduler.serve(subjects.SUBMIT, SubmitRequest, take)
    await scheduler.flush()
    gateway = await connect("gateway-us", "us", CLASSES)
    gateway.regions.subject_for = lambda subject, message: subject  # type: ignore[method-assign]
    with pytest.raises(OutsideRegions, match="'eu' came on a subject of ''"):
        await gateway.request(subjects.SUBMIT, SUBMIT, Queued, timeout_s=60)
    assert not taken and scheduler.regions.num_refused == 1
