"""Fetches the vectors of images from the workers that encode for others.

    EncodeImage ──▶ encode worker      with a new transfer id
    RenewLease  ──▶ encode worker      while the vectors are wanted
    frames      ◀── encode worker      checked, and in order
    complete; or lost, EncodeFailed or late: AbortRequest, and the next worker, then none is left

Without such a worker, or after all have failed, a worker encodes its images itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain

import structlog

from shared.background import Background
from shared.clock import Clock
from shared.engine.model_config.vision_config import Grid, VisionConfig
from shared.engine.vision.encoder_choice import encoders_of
from shared.engine.vision.image_jobs import WantedImage
from shared.errors import DependencyUnavailable, HearthError, LinkLost
from shared.kv_wire.link import KvReceiver, PushBounds
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.lifecycle.health import Loss
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    PLACEMENT_ID_BYTES,
    AbortRequest,
    Done,
    EncodeFailed,
    EncodeImage,
    Heartbeat,
    RenewLease,
    Role,
)
from shared.pixels.byte_transfer import ByteTransfer
from shared.pixels.pixel_frames import VECTOR_FORMAT
from shared.randomness import Randomness
from shared.subjects import control, encode, encoded
from shared.transport.bus import Bus, error_of
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

ACK_S = 0.25  # plus the round trip
LEASE_S, RENEW_S = 3.0, 1.0
MAX_TRIES = 2  # workers, for one image
# An image may take so long, or so many times as long as tiles have taken there: then it is
# encoded here, as another queue is long.
PATIENCE_S, SLOWNESS = 3.0, 4.0
UNKNOWN_TILE_S = 1.0  # before the first heartbeat with a tile


@dataclass(frozen=True, slots=True)
class VectorForm:
    """What vectors a worker needs: `key` as of `encoder_key`, `vector_bytes` of one token."""

    key: str
    config: VisionConfig
    vector_bytes: int

    def num_bytes(self, grid: Grid) -> int:
        return self.config.num_tokens(grid) * self.vector_bytes


class RemoteVectors:
    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        health_monitor: HealthMonitor,
        receiver: KvReceiver,
        link_keys: LinkKeys | None,
        clock: Clock,
        randomness: Randomness,
        *,
        form: VectorForm,
        roles: tuple[Role, ...],
    ) -> None:
        """`receiver` listens for frames; `link_keys` seal links over TCP, unless None. Its owner
        closes it. `roles` are those by which other workers may know this one.
        """
        self._bus = bus
        self._outbox = outbox
        self._monitor = health_monitor
        self._receiver = receiver
        self._link_keys = link_keys
        self._clock = clock
        self._randomness = randomness
        self._form = form
        self._roles = roles
        self._tries: dict[bytes, tuple[str, ByteTransfer]] = {}  # by transfer id
        self._background = Background()

    async def start(self) -> None:
        for role in self._roles:
            subject = encoded(role, self._bus.process_id)
            await self._bus.subscribe(subject, EncodeFailed, self._on_failed)
        self._monitor.on_lost(self._on_lost)
        self._background.start_own(self._renew_leases())

    async def stop(self) -> None:
        await self._background.stop()

    async def fetch(self, wanted: WantedImage) -> bytearray | None:
        """Returns vectors in memory that nothing else uses, or None: to be encoded here."""
        for worker_id in self._candidates(wanted)[:MAX_TRIES]:
            if worker_id == self._bus.process_id:
                return None
            heartbeat = self._monitor.fleet.heartbeat_of(worker_id)
            if heartbeat is None:
                continue
            try:
                return await self._try(heartbeat, wanted)
            except HearthError as error:
                log.info("encode_attempt_failed", encode=worker_id, reason=error.message)
        return None

    def _candidates(self, wanted: WantedImage) -> list[str]:
        fleet = self._monitor.fleet
        itself = None if self._monitor.encoder is None else self._bus.process_id
        workers = chain(fleet.live("encode"), fleet.live("prefill"))
        return encoders_of(wanted.key, self._form.key, workers, self._regions(wanted), itself)

    def _regions(self, wanted: WantedImage) -> frozenset[str] | None:
        classes = self._monitor.refusals.classes
        allowed = wanted.pixels.allowed_regions or None
        return classes.allowed(wanted.pixels.region_class, allowed)

    async def _try(self, worker: Heartbeat, wanted: WantedImage) -> bytearray:
        """Raises HearthError if the worker rejects the command, fails, is lost or is late."""
        num_tiles, regions = wanted.pixels.shape[0], self._regions(wanted)
        transfer_id = self._randomness.bytes(PLACEMENT_ID_BYTES)
        transfer = ByteTransfer(self._form.num_bytes(wanted.grid), VECTOR_FORMAT)
        bounds = None if regions is None else PushBounds(regions, worker.region)
        self._receiver.expect(transfer_id, transfer, bounds, is_private=not wanted.is_retained)
        self._tries[transfer_id] = worker.process_id, transfer
        is_complete, limit_s = False, PATIENCE_S + SLOWNESS * num_tiles * _tile_s(worker)
        try:
            async with asyncio.timeout(limit_s):
                await self._ask(worker, wanted, transfer_id, limit_s)
                await transfer.complete()
            is_complete = True
            return transfer.taken()
        except TimeoutError:
            raise DependencyUnavailable(f"no vectors came within {limit_s:.1f} s") from None
        finally:
            del self._tries[transfer_id]
            self._receiver.forget(transfer_id)
            if not is_complete:
                abort = AbortRequest(placement_id=transfer_id, reason="superseded")
                self._outbox.post(control("encode", worker.process_id), abort)
                await self._receiver.idle(transfer_id)
                transfer.zero()

    async def _ask(
        self, worker: Heartbeat, wanted: WantedImage, transfer_id: bytes, limit_s: float
    ) -> None:
        worker_id, keys, pixels = worker.process_id, self._link_keys, wanted.pixels
        command = EncodeImage(
            transfer_id=transfer_id,
            worker_id=self._bus.process_id,
            encoder=self._form.key,
            tenant_id=pixels.tenant_id,
            request_id=pixels.request_id,
            gateway_id=pixels.gateway_id,
            cache_root=wanted.key.cache_root,
            image_hash=pixels.image_hash,
            grid=wanted.grid,
            target=self._receiver.address,
            link_key=None if keys is None else keys.key_for(worker_id, worker.region),
            lease_s=LEASE_S,
            deadline_s=limit_s,
            is_zero_retention=not wanted.is_retained,
            allowed_regions=pixels.allowed_regions,
            region_class=pixels.region_class,
        )
        requests = self._monitor.requests
        await requests.request(worker_id, encode(worker_id), command, Done, base_s=ACK_S)

    def _on_failed(self, message: EncodeFailed) -> None:
        worker_id, transfer = self._tries.get(message.transfer_id, (None, None))
        if transfer is not None and worker_id == message.worker_id:
            transfer.fail(error_of(message.failure))

    def _on_lost(self, worker_id: str, loss: Loss) -> None:
        """Ends the tries of a worker. Its next process gets another link key."""
        if self._link_keys is not None:
            self._link_keys.forget(worker_id)
        for tried, transfer in self._tries.values():
            if tried == worker_id:
                transfer.fail(LinkLost(f"{worker_id} was lost: {loss.value}"))

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            self._renew()  # apart, so that nothing here refers to a transfer while it sleeps

    def _renew(self) -> None:
        by_worker: dict[str, list[bytes]] = {}
        for transfer_id, (worker_id, _) in self._tries.items():
            by_worker.setdefault(worker_id, []).append(transfer_id)
        for worker_id, transfer_ids in by_worker.items():
            message = RenewLease(
                decode_worker_id=self._bus.process_id,
                placement_ids=tuple(transfer_ids),
                lease_s=LEASE_S,
            )
            self._outbox.post(control("encode", worker_id), message)


def _tile_s(worker: Heartbeat) -> float:
    load = worker.load
    if load is None or not load.num_encoded_tiles:
        return UNKNOWN_TILE_S
    return load.encode_s / load.num_encoded_tiles
