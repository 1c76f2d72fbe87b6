"""A worker that wants vectors and workers that encode for it, over real links."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from services.encode.service import EncodeService
from shared.clock import MonotonicClock
from shared.engine.model_config.vision_config import SiglipConfig
from shared.engine.unretained_tenants import UnretainedTenants
from shared.engine.vision import remote_vectors
from shared.engine.vision.encoder_choice import encoders_of
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.engine.vision.remote_vectors import RemoteVectors, VectorForm
from shared.engine.vision.vector_cache import ImageKey, VectorCache
from shared.errors import HearthError, InvalidRequest, StepFailed
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FrameHeader
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.lifecycle.health import Fleet, Loss
from shared.messages import DropTenantKv, EncoderCard, Heartbeat, Message, RenewLease, Role
from shared.pixels.byte_transfer import ByteTransfer
from shared.pixels.pixel_fetcher import PixelRequest
from shared.randomness import SystemRandomness
from shared.regions.region_classes import region_classes
from shared.subjects import control
from shared.tenancy.refusals import Refusals
from tests.support.waiting import until

KEY = "weights/cpu/float32"
CONFIG = SiglipConfig(
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    image_size=8,
    patch_size=4,
    layer_norm_eps=1e-6,
    scale_factor=1,
    image_token_id=1,
    output_size=4,
)
VECTOR_BYTES = 16
GRID = 1, 2
SHAPE = CONFIG.pixel_shape(GRID)
ROOT, HASH = b"r" * 16, b"h" * 16


class Wire:
    """The messages of all processes; those to the processes in `silent` are lost."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        self.sent: list[Message] = []
        self.silent: set[str] = set()

    def deliver(self, subject: str, message: Message) -> Any:
        self.sent.append(message)
        handler = self.handlers.get(subject)
        if handler is None or any(each in subject for each in self.silent):
            return None
        return handler(message)


class WireBus:
    """A process's end: its bus, its outbox and its requests."""

    def __init__(self, wire: Wire, process_id: str) -> None:
        self.wire, self.process_id = wire, process_id

    async def subscribe(self, subject: str, kind: Any, handler: Callable[[Any], Any]) -> None:
        self.wire.handlers[subject] = handler

    serve = subscribe

    def post(self, subject: str, message: Message) -> None:
        self.wire.deliver(subject, message)

    async def request(self, peer: str, subject: str, message: Message, kind: Any, *, base_s: float):
        reply = self.wire.deliver(subject, message)
        if reply is None:
            raise HearthError("no reply")
        return reply


class Monitor:
    def __init__(self, bus: WireBus, region: str) -> None:
        self.fleet = Fleet(bus.process_id)
        self.refusals = Refusals(region, region_classes(["eu=north,south"]))
        self.requests = bus
        self.state = "ready"
        self.encoder: EncoderCard | None = None
        self.lost: list[Callable[[str, Loss], None]] = []

    def on_lost(self, handler: Callable[[str, Loss], None]) -> None:
        self.lost.append(handler)

    def see(self, *others: Heartbeat) -> None:
        for each in others:
            self.fleet.observe(each, 0.0)

    def lose(self, process_id: str) -> None:
        for handler in self.lost:
            handler(process_id, Loss.UNRESPONSIVE)


def beat(process_id: str, *roles: Role, region: str = "north", key: str | None = None) -> Heartbeat:
    card = None if key is None else EncoderCard(model="m", key=key)
    return Heartbeat(
        process_id=process_id,
        epoch=1,
        sequence_number=1,
        roles=roles,
        state="ready",
        interval_s=0.25,
        region=region,
        encoder=card,
    )


@dataclass
class Encoder:
    """Vectors that are the tile's first values; `gate` holds tiles up."""

    config: SiglipConfig = CONFIG
    vector_bytes: int = VECTOR_BYTES
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_tiles: int = 0
    error: HearthError | None = None

    async def encode(self, tile: NDArray[np.uint8]) -> bytes:
        await self.gate.wait()
        self.num_tiles += 1
        if self.error is not None:
            raise self.error
        return tile.tobytes()[: CONFIG.tokens_per_tile * VECTOR_BYTES]

    async def close(self) -> None: ...


PIXELS = np.random.default_rng(3).integers(0, 256, SHAPE, dtype=np.uint8)
VECTORS = b"".join(each.tobytes()[: CONFIG.tokens_per_tile * VECTOR_BYTES] for each in PIXELS)


class Server:
    """An encode worker."""

    def __init__(self, wire: Wire, name: str, region: str = "north") -> None:
        self.bus, self.encoder = WireBus(wire, name), Encoder()
        self.encoder.gate.set()
        self.monitor = Monitor(self.bus, region)
        self.monitor.encoder = EncoderCard(model="m", key=KEY)
        self.num_fetches = 0
        self.is_held = True  # the gateway has the pixels
        clock = MonotonicClock()
        self.cache = VectorCache(1 << 20)
        self.unretained = UnretainedTenants(clock)
        self.jobs = ImageJobs(
            self.encoder,
            self.fetch,
            self.cache,
            clock.now,
            lambda: None,
            unretained=self.unretained,
        )
        self.service = EncodeService(
            self.bus,
            self.bus,
            self.monitor,
            clock,
            config=CONFIG,
            jobs=self.jobs,
            dialer=Dialer(5.0, region=region),
            unretained=self.unretained,
        )

    async def fetch(self, request: PixelRequest, deadline_s: float) -> memoryview:
        self.num_fetches += 1
        if not self.is_held:
            raise InvalidRequest("this gateway holds no such image")
        return PIXELS.copy().reshape(-1).data

    async def stop(self) -> None:
        self.encoder.gate.set()
        await self.service.stop()
        await self.jobs.close()


class Client:
    """A prefill worker."""

    def __init__(self, wire: Wire, receiver: KvServer, keys: LinkKeys | None) -> None:
        self.bus = WireBus(wire, "prefill-1")
        self.monitor = Monitor(self.bus, "north")
        self.receiver = receiver
        self.remote = RemoteVectors(
            self.bus,
            self.bus,
            self.monitor,
            receiver,
            keys,
            MonotonicClock(),
            SystemRandomness(),
            form=VectorForm(KEY, CONFIG, VECTOR_BYTES),
            roles=("prefill",),
        )


@dataclass
class World:
    wire: Wire
    client: Client
    servers: list[Server]

    @property
    def server(self) -> Server:
        return self.servers[0]

    def fetch(self, **changes: Any) -> asyncio.Task[bytearray | None]:
        return asyncio.ensure_future(self.client.remote.fetch(wanted(**changes)))

    def sent(self, name: str) -> list[Any]:
        return [each for each in self.wire.sent if type(each).__name__ == name]


def wanted(
    image_hash: bytes = HASH, *, tenant: str = "a", is_retained: bool = True, **pixels: Any
) -> WantedImage:
    request = PixelRequest(
        gateway_id="gateway-1",
        tenant_id=tenant,
        request_id="request-1",
        image_hash=image_hash,
        shape=SHAPE,
        **pixels,
    )
    key = ImageKey(tenant, ROOT, image_hash)
    return WantedImage(key, request, is_retained=is_retained, grid=GRID)


@pytest.fixture(params=["memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    wire, kind = Wire(), request.param
    keys = LinkKeys("aead", SystemRandomness()) if kind == "sealed" else None
    receiver = await KvServer.start(instance_id=b"prefill", link_keys=keys, region="north")
    if kind == "sealed":
        receiver._address = msgspec.structs.replace(receiver.address, unix_path="")
    client = Client(wire, receiver, keys)
    servers = [Server(wire, "encode-1"), Server(wire, "encode-2", region="west")]
    for each in servers:
        await each.service.start()
        each.monitor.see(beat("prefill-1", "prefill"))
        own = beat(each.bus.process_id, "encode", region=each.monitor.refusals.region, key=KEY)
        if each is servers[0]:
            client.monitor.see(own)
    await client.remote.start()
    yield World(wire, client, servers)
    await client.remote.stop()
    for each in servers:
        await each.stop()
    await receiver.close()


@pytest.mark.parametrize("world", ["memory", "sealed"], indirect=True)
async def test_vectors_arrive_and_are_encoded_once(world: World) -> None:
    first, second = await asyncio.gather(world.fetch(), world.fetch())
    assert first == second == VECTORS
    assert first is not second
    assert (world.server.num_fetches, world.server.jobs.counts.num_encoded) == (1, 1)
    await until(lambda: not world.server.service.num_unfinished)


async def test_another_tenant_gets_none_of_it(world: World) -> None:
    assert await world.fetch() == VECTORS
    assert await world.fetch(tenant="b") == VECTORS
    assert world.server.jobs.counts.num_encoded == 2


async def test_without_workers_of_the_same_encoder_there_is_none(world: World) -> None:
    others = [beat("encode-8", "encode", key="other"), beat("prefill-2", "prefill")]
    client = Client(Wire(), world.client.receiver, None)
    client.monitor.see(*others)
    assert await client.remote.fetch(wanted()) is None
    assert client.bus.wire.sent == []


async def test_a_worker_with_another_encoder_refuses(world: World) -> None:
    world.server.monitor.encoder = EncoderCard(model="m", key="other")
    assert await world.fetch() is None
    assert world.server.num_fetches == 0


async def test_a_lost_worker_leaves_the_image_to_the_next(world: World) -> None:
    both = {each.bus.process_id: each for each in world.servers}
    world.client.monitor.see(beat("encode-2", "encode", region="west", key=KEY))
    cards = [beat(each, "encode", key=KEY) for each in both]
    name = encoders_of(wanted().key, KEY, cards, None)[0]
    first = both.pop(name)
    (other,) = both.values()
    first.encoder.gate.clear()
    fetching = world.fetch()
    await until(lambda: first.jobs.is_encoding)
    world.client.monitor.lose(name)
    assert await fetching == VECTORS
    assert other.jobs.counts.num_encoded == 1
    await until(lambda: world.sent("AbortRequest") and not first.service.num_unfinished)


async def test_a_worker_encodes_its_own_and_another_ones_image_once(world: World) -> None:
    async def nobody_else(image: WantedImage) -> None:
        return None

    server = world.server
    server.jobs._fetch_vectors = nobody_else  # it is the one that all choose
    server.encoder.gate.clear()
    own = [wanted() for _ in range(2)]
    for each in own:
        server.jobs.want(each)
    fetching = world.fetch()
    await until(lambda: server.jobs.is_encoding)
    late = wanted()
    server.jobs.want(late)
    server.encoder.gate.set()
    assert await fetching == VECTORS
    await until(lambda: late.vectors is not None)
    assert [each.vectors for each in own] == [VECTORS] * 2
    assert (server.num_fetches, server.jobs.counts.num_encoded) == (1, 1)
    for each in (*own, late):
        server.jobs.drop(each)


async def test_a_failed_image_is_left_to_the_asking_worker(world: World) -> None:
    world.server.encoder.error = StepFailed("no")
    assert await world.fetch() is None
    world.server.encoder.error = None
    world.server.is_held = False
    assert await world.fetch(image_hash=b"i" * 16) is None
    assert len(world.sent("EncodeFailed")) == 2


async def test_a_slow_worker_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_vectors, "PATIENCE_S", 0.1)
    monkeypatch.setattr(remote_vectors, "SLOWNESS", 0.0)
    world.server.encoder.gate.clear()
    assert await world.fetch() is None
    await until(lambda: not world.server.service.num_unfinished)


async def test_an_abandoned_fetch_ends_there(world: World) -> None:
    world.server.encoder.gate.clear()
    fetching = world.fetch()
    await until(lambda: world.server.jobs.is_encoding)
    fetching.cancel()
    await until(lambda: not world.server.service.num_unfinished)
    world.server.encoder.gate.set()
    await until(lambda: not world.server.jobs.is_encoding)
    assert world.server.encoder.num_tiles == 1 < len(PIXELS)


async def test_a_worker_that_hangs_is_not_pushed_to_beyond_its_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_hanging = asyncio.Event()

    async def hang(transfer: ByteTransfer, header: FrameHeader, payload: memoryview) -> None:
        is_hanging.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ByteTransfer, "frame", hang)
    fetching = world.fetch()
    await is_hanging.wait()
    (encoding,) = world.server.service._encodings.values()
    world.server.service._expire(encoding.lease_until + 1.0)
    await until(lambda: not world.server.service.num_unfinished)
    await world.client.receiver.close()
    assert await fetching is None


async def test_leases_are_renewed_and_expire(world: World) -> None:
    world.server.encoder.gate.clear()
    fetching = world.fetch()
    await until(lambda: bool(world.sent("RenewLease")))
    (encoding,) = world.server.service._encodings.values()
    lease_until = encoding.lease_until
    world.server.service._expire(lease_until)
    assert not encoding.has_ended
    world.server.service._expire(lease_until + 0.001)
    await until(lambda: not world.server.service.num_unfinished)
    message = RenewLease(
        decode_worker_id="prefill-1",
        placement_ids=(encoding.request.transfer_id,),
        lease_s=1.0,
    )
    world.client.bus.post(control("encode", "encode-1"), message)
    assert await fetching is None  # the worker says that it does not know the transfer


async def test_nothing_stays_of_a_tenant_with_zero_retention(world: World) -> None:
    world.server.encoder.gate.clear()
    fetching = world.fetch(is_retained=False)
    await until(lambda: world.server.jobs.is_encoding)
    (encoding,) = world.server.service._encodings.values()
    held: list[bytearray] = []
    give = world.server.jobs._give
    world.server.jobs._give = lambda image, vectors: (held.append(vectors), give(image, vectors))
    world.server.encoder.gate.set()
    assert await fetching == VECTORS
    await until(lambda: not world.server.service.num_unfinished)
    assert encoding.wanted.vectors is None and world.server.cache.num_bytes == 0
    assert held == [bytearray(len(VECTORS))]
    world.server.unretained.add(DropTenantKv(tenant_ids=("a",), unretained_s=60.0))
    assert await world.fetch() == VECTORS  # of a tenant that had another retention when it asked
    assert world.server.cache.num_bytes == 0


async def test_nothing_stays_of_requests_that_run_when_their_tenant_is_dropped(
    world: World,
) -> None:
    """Of one that uses an image, one that waits for it, and one that wants it later."""
    server, cache = world.server, world.server.cache
    jobs, used, waiting, later = server.jobs, wanted(), wanted(b"i" * 16), wanted(b"j" * 16)
    jobs.want(used)
    await until(lambda: used.vectors is not None)
    server.encoder.gate.clear()
    jobs.want(waiting)
    await until(lambda: jobs.is_encoding)
    assert cache.num_bytes == len(VECTORS)
    server.unretained.add(DropTenantKv(tenant_ids=("a",), unretained_s=60.0))
    jobs.drop_tenant("a")
    assert (cache.num_bytes, used.vectors) == (0, VECTORS)
    jobs.want(later)
    server.encoder.gate.set()
    for each in (used, waiting, later):
        await until(lambda each=each: each.vectors is not None)
        vectors = each.vectors
        assert vectors == VECTORS
        jobs.drop(each)
        assert vectors == bytes(len(VECTORS))
    assert cache.num_bytes == 0


@pytest.mark.parametrize(
    "residency", [{"region_class": "eu"}, {"allowed_regions": ("north",)}], ids=["class", "regions"]
)
async def test_an_image_stays_in_the_regions_of_its_tenant(world: World, residency: dict) -> None:
    elsewhere = world.servers[1]
    world.client.monitor.see(beat("encode-2", "encode", region="west", key=KEY))
    for number in range(8):
        assert await world.fetch(image_hash=bytes([number]) * 16, **residency) == VECTORS
    assert (world.server.num_fetches, elsewhere.num_fetches) == (8, 0)
    world.client.monitor.fleet = Fleet("prefill-1")
    lying = beat("encode-2", "encode", region="north", key=KEY)  # of an earlier process, say
    world.client.monitor.see(lying)
    assert await world.fetch(image_hash=b"z" * 16, **residency) is None
    assert elsewhere.num_fetches == 0
    assert elsewhere.monitor.refusals.totals == {"encode": 1}


async def test_a_draining_worker_ends_what_it_has_and_takes_no_more(world: World) -> None:
    world.server.encoder.gate.clear()
    fetching = world.fetch()
    await until(lambda: world.server.jobs.is_encoding)
    world.server.monitor.state = "draining"
    assert await world.fetch(image_hash=b"i" * 16) is None
    world.server.encoder.gate.set()
    assert await fetching == VECTORS
    await world.server.service.drain()


def test_workers_agree_and_only_a_lost_ones_images_move() -> None:
    names = [f"encode-{n}" for n in range(4)]
    beats = [beat(each, "encode", key=KEY) for each in names]
    images = [ImageKey("a", ROOT, bytes([n, m]) * 8) for n in range(16) for m in range(16)]
    chosen = {image: encoders_of(image, KEY, beats, None)[0] for image in images}
    shares: dict[str, int] = defaultdict(int)
    for each in chosen.values():
        shares[each] += 1
    assert min(shares[name] for name in names) > len(images) / 8
    for image in images:
        left = encoders_of(image, KEY, reversed(beats[1:]), None)[0]
        assert left == chosen[image] or chosen[image] == names[0]


def test_a_worker_that_encodes_for_others_is_one_of_them() -> None:
    (image,) = [ImageKey("a", ROOT, HASH)]
    assert encoders_of(image, KEY, [], None, itself="prefill-1") == []
    found = encoders_of(image, KEY, [beat("encode-1", "encode", key=KEY)], None, "prefill-1")
    assert sorted(found) == ["encode-1", "prefill-1"]
