"""The encode handlers: encode images for other workers and push their vectors.

An image is encoded under a lease that the asking worker renews. It ends when its vectors are
acknowledged, when that worker aborts it, when its lease or deadline expires, or when the link is
lost; what belongs to a tenant with zero retention is then zeroed.

    EncodeImage ──▶ wanted ──encoded, or cached──▶ pushed ──▶ forgotten
                       └──AbortRequest, no lease, failed──────────▲
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from shared.background import Background, failing_alone, is_logged, item_error, start_awaited
from shared.clock import Clock
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.unretained_tenants import UnretainedTenants
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.engine.vision.vector_cache import ImageKey
from shared.errors import (
    HearthError,
    InvalidRequest,
    OutsideRegions,
    UnknownPlacement,
    WorkerBusy,
    WorkerUnfit,
)
from shared.kv_wire.link import KvDialer, PushBounds
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import AbortRequest, Done, EncodeFailed, EncodeImage, Heartbeat, RenewLease
from shared.pixels.pixel_fetcher import PixelRequest
from shared.pixels.pixel_frames import MAX_IMAGE_BYTES, VECTOR_FORMAT, byte_header, image_bytes
from shared.subjects import control, encode, encoded
from shared.transport.bus import Bus, failure_of
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
MAX_ENCODINGS = 256
_ASKING_ROLES = frozenset({"prefill", "decode"})


@dataclass(slots=True, eq=False)
class Encoding:
    request: EncodeImage
    wanted: WantedImage
    bounds: PushBounds | None  # where the vectors may go; None: anywhere
    lease_until: float
    deadline_at: float
    has_ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    pushing: asyncio.Task[None] | None = None

    def end(self) -> None:
        self.has_ended = True
        self.changed.set()
        if self.pushing is not None:  # a worker that hangs acknowledges nothing
            self.pushing.cancel()

    async def encoded(self) -> bytearray | None:
        """Returns the vectors, or None if they are not wanted any more. Raises the HearthError of
        an image that could not be encoded.
        """
        wanted = self.wanted
        while wanted.vectors is None and wanted.error is None and not self.has_ended:
            self.changed.clear()
            await self.changed.wait()
        if wanted.error is not None:
            raise wanted.error
        return None if self.has_ended else wanted.vectors


class EncodeService:
    """Serves the encoder of `jobs`, whose images have the form of `config`; its owner closes
    `jobs` after it.
    """

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        health_monitor: HealthMonitor,
        clock: Clock,
        *,
        config: VisionConfig,
        jobs: ImageJobs,
        dialer: KvDialer,
        unretained: UnretainedTenants,
    ) -> None:
        self._bus = bus
        self._outbox = outbox
        self._monitor = health_monitor
        self._clock = clock
        self._config = config
        self._jobs = jobs
        self._dialer = dialer
        self._unretained = unretained
        self._encodings: dict[bytes, Encoding] = {}  # by transfer id
        self._background, self._running = Background(), Background()

    async def start(self) -> None:
        self._jobs.listen(self._on_ready)
        worker_id = self._bus.process_id
        await self._bus.subscribe(
            control("encode", worker_id), AbortRequest | RenewLease, self._on_control
        )
        await self._bus.serve(encode(worker_id), EncodeImage, self._encode)
        self._background.start_own(self._sweep())

    @property
    def num_unfinished(self) -> int:
        """Images that are encoded or pushed."""
        return len(self._encodings)

    @property
    def num_pushes(self) -> int:
        return len(self._encodings)

    def tenants(self) -> set[str]:
        """Returns the tenants whose images are encoded or pushed."""
        return {each.request.tenant_id for each in self._encodings.values()}

    def hand_over(self) -> None:
        """Does nothing: whoever waits for vectors encodes the image itself, later."""

    async def drain(self) -> None:
        """Waits for all images, so that other workers still receive their vectors."""
        await self._running.idle()

    async def stop(self) -> None:
        await self._background.stop()
        for encoding in self._encodings.values():
            encoding.end()
        await self.drain()
        await self._dialer.close()

    def _encode(self, request: EncodeImage) -> Done:
        if request.transfer_id in self._encodings:
            return Done()
        bounds = self._check(request)
        request = self._unretained.current(request)
        now = self._clock.now()
        wanted = self._wanted(request)
        encoding = Encoding(
            request,
            wanted,
            bounds,
            lease_until=now + request.lease_s,
            deadline_at=now + request.deadline_s,
        )
        self._encodings[request.transfer_id] = encoding
        self._jobs.want(wanted)
        self._running.start_item(self._deliver(encoding), is_logged)
        return Done()

    def _check(self, request: EncodeImage) -> PushBounds | None:
        """Returns where the vectors may go. Raises InvalidRequest, OutsideRegions, WorkerBusy,
        WorkerUnfit.
        """
        if self._monitor.state != "ready":
            raise WorkerBusy(f"{self._bus.process_id} is {self._monitor.state}")
        if len(self._encodings) >= MAX_ENCODINGS:
            raise WorkerBusy(f"{self._bus.process_id} has {len(self._encodings)} images")
        asking = self._asking(request)
        own = self._monitor.encoder
        if own is None or own.key != request.encoder:
            raise WorkerUnfit(f"{self._bus.process_id} has another encoder than {request.encoder}")
        num_bytes = image_bytes(self._config.pixel_shape(request.grid))
        if not 0 < num_bytes <= MAX_IMAGE_BYTES:
            raise InvalidRequest(
                f"an image of {num_bytes} bytes, not between 1 and {MAX_IMAGE_BYTES}", param="grid"
            )
        refusals = self._monitor.refusals
        if refusals.require("encode", request) is None:
            return None
        regions = refusals.require("encode", request, asking.region)
        return None if regions is None else PushBounds(regions, asking.region)

    def _wanted(self, request: EncodeImage) -> WantedImage:
        pixels = PixelRequest(
            gateway_id=request.gateway_id,
            tenant_id=request.tenant_id,
            request_id=request.request_id,
            image_hash=request.image_hash,
            shape=self._config.pixel_shape(request.grid),
            region_class=request.region_class,
            allowed_regions=request.allowed_regions,
        )
        key = ImageKey(request.tenant_id, request.cache_root, request.image_hash)
        is_retained = not request.is_zero_retention
        return WantedImage(
            key, pixels, is_retained=is_retained, is_encoded_here=True, grid=request.grid
        )

    def _asking(self, request: EncodeImage) -> Heartbeat:
        heartbeat = self._monitor.fleet.heartbeat_of(request.worker_id)
        if heartbeat is None or _ASKING_ROLES.isdisjoint(heartbeat.roles):
            raise InvalidRequest(f"{request.worker_id} is no worker that this one knows")
        return heartbeat

    async def _deliver(self, encoding: Encoding) -> None:
        request = encoding.request
        try:
            vectors = await encoding.encoded()
            if vectors is not None:
                encoding.pushing = start_awaited(self._push(encoding, vectors))
                await asyncio.wait((encoding.pushing,))
                if not encoding.pushing.cancelled():
                    encoding.pushing.result()
        except HearthError as error:
            if isinstance(error, OutsideRegions):
                self._monitor.refusals.count("kv_push", request.tenant_id, "")
            log.info("image_not_delivered", reason=error.message, to=request.worker_id)
            self._send_failed(request.worker_id, request.transfer_id, error)
        except BaseException as raised:  # outermost handler
            failure = item_error(raised)
            log.exception("image_delivery_failed", to=request.worker_id)
            self._send_failed(request.worker_id, request.transfer_id, failure)
        finally:
            del self._encodings[request.transfer_id]
            self._jobs.drop(encoding.wanted)

    async def _push(self, encoding: Encoding, vectors: bytearray) -> None:
        """Pushes the vectors. Raises LinkLost, FrameRefused, OutsideRegions."""
        request, bounds, source = encoding.request, encoding.bounds, memoryview(vectors)
        link = await self._dialer.link(request.target, request.link_key)
        if bounds is not None:
            own, peer = link.regions
            if not bounds.allow(own, peer):
                raise OutsideRegions(f"vectors from {own!r} to {peer!r}: outside the regions")
            await link.offer(request.transfer_id)
        for number, first in enumerate(range(0, len(source), link.frame_bytes)):
            part = source[first : first + link.frame_bytes]

            async def fill(slot: memoryview, part: memoryview = part) -> None:
                slot[:] = part

            await link.send(
                byte_header(request.transfer_id, number, first, len(part), VECTOR_FORMAT),
                fill,
                request.tenant_id,
                is_private=not encoding.wanted.is_retained,
            )

    def _on_ready(self) -> None:
        for encoding in self._encodings.values():
            encoding.changed.set()

    def _on_control(self, message: AbortRequest | RenewLease) -> None:
        match message:
            case AbortRequest(placement_id=transfer_id):
                if transfer_id in self._encodings:
                    self._encodings[transfer_id].end()
            case RenewLease():
                self._renew(message)

    def _renew(self, message: RenewLease) -> None:
        """Renews leases. Fails an unknown one: the asking worker has missed its end."""
        until = self._clock.now() + message.lease_s
        for transfer_id in message.placement_ids:
            encoding = self._encodings.get(transfer_id)
            if encoding is not None:
                encoding.lease_until = until
            else:
                error = UnknownPlacement("this worker does not encode that image")
                self._send_failed(message.decode_worker_id, transfer_id, error)

    def _send_failed(self, worker_id: str, transfer_id: bytes, error: Exception) -> None:
        heartbeat = self._monitor.fleet.heartbeat_of(worker_id)
        if heartbeat is None:
            return
        message = EncodeFailed(
            transfer_id=transfer_id, worker_id=self._bus.process_id, failure=failure_of(error)
        )
        self._outbox.post(encoded(heartbeat.roles[0], worker_id), message)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            with failing_alone("encodings_not_expired"):
                self._expire(self._clock.now())

    def _expire(self, now: float) -> None:
        for encoding in self._encodings.values():
            if now > min(encoding.lease_until, encoding.deadline_at) and not encoding.has_ended:
                log.warning("encode_lease_expired", worker=encoding.request.worker_id)
                encoding.end()
