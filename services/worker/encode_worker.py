"""Composes an encode worker: an image encoder without the model behind it.

start ──▶ ready ──DrainWorker──▶ draining ──is_undone──▶ ready
            └──SIGTERM──▶ draining ──all vectors are pushed──▶ stopped
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.encode.service import EncodeService
from services.worker.drained_worker import DrainedWorker
from services.worker.image_port import (
    PixelPort,
    encoder_card,
    image_dialer,
    load_image_encoder,
    open_pixel_port,
    takes_no_images,
    vision_of,
)
from shared.background import Background
from shared.clock import MonotonicClock, process_age_s
from shared.config import EncodeConfig, check
from shared.engine.unretained_tenants import UnretainedTenants
from shared.engine.vision.image_encoder import ImageEncoder
from shared.engine.vision.image_jobs import ImageJobs
from shared.engine.vision.vector_cache import VectorCache
from shared.errors import InvalidRequest
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.heartbeat_numbers import HeartbeatNumbers
from shared.lifecycle.identity import connect
from shared.lifecycle.process import DEVICE_LOST_STATUS, Service
from shared.lifecycle.start_heartbeats import StartHeartbeats
from shared.lifecycle.worker_roles import WorkerRoles
from shared.messages import (
    ChangeRoles,
    CountTenantKv,
    DrainState,
    DrainWorker,
    DropTenantKv,
    EncoderCard,
    ParkWorker,
    ResizeKv,
    TenantKvCounted,
    TenantKvDropped,
    WakeWorker,
    WorkerLoad,
)
from shared.metrics.process_report import ProcessReport
from shared.numerics import Numerics
from shared.randomness import SystemRandomness
from shared.subjects import lifecycle, tenant_kv
from shared.telemetry.stage_times import StageTimes
from shared.transport.bus import Bus
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

TILE_BUDGET_S = 60.0  # a tile that takes longer makes the worker suspect


class EncoderLoad:
    """The load of an encode worker, for its heartbeats: its step is stuck while a tile is."""

    def __init__(self, jobs: ImageJobs) -> None:
        self._jobs = jobs
        self._step = self._num_tiles = 0

    def load(self, num_running: int) -> WorkerLoad:
        num_tiles = self._jobs.counts.num_tiles
        if not self._jobs.is_encoding or num_tiles != self._num_tiles:
            self._step += 1
        self._num_tiles = num_tiles
        load = WorkerLoad(step=self._step, step_budget_s=TILE_BUDGET_S, num_running=num_running)
        return self._jobs.counts.add_to(load)


class EncodeWorker:
    """The process. It becomes ready once its handlers serve, and leaves before they drain."""

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        health_monitor: HealthMonitor,
        heartbeats: StartHeartbeats,
        service: EncodeService,
        jobs: ImageJobs,
        port: PixelPort,
        unretained: UnretainedTenants,
        clock: MonotonicClock,
        on_device_lost: Callable[[], None] = lambda: os._exit(DEVICE_LOST_STATUS),
    ) -> None:
        """`heartbeats` go on until those of `health_monitor` have begun. `on_device_lost` ends the
        process, after the worker has left the fleet.
        """
        self._bus = bus
        self._outbox = outbox
        self._monitor = health_monitor
        self._heartbeats = heartbeats
        self._service = service
        self._jobs = jobs
        self._port = port
        self._unretained = unretained
        self._drained = DrainedWorker(clock, (service,))
        self._is_leaving = False
        self._background = Background()
        self._on_device_lost = on_device_lost
        jobs.on_device_lost(self._start_leaving)

    async def start(self) -> None:
        self._outbox.start()
        await self._monitor.start()
        await self._heartbeats.stop()
        await self._service.start()
        own = self._bus.process_id
        kinds = ParkWorker | WakeWorker | ResizeKv | ChangeRoles | DrainWorker
        await self._bus.serve(lifecycle("encode", own), kinds, self._on_command)
        of_tenants = DropTenantKv | CountTenantKv
        await self._bus.serve(tenant_kv("encode", own), of_tenants, self._on_tenant_kv)
        await self._monitor.transition_to("ready")
        log.info("worker_started")

    async def drain(self) -> None:
        self._is_leaving = True
        await self._monitor.transition_to("draining")
        await self._service.drain()

    def _start_leaving(self, reason: str) -> None:
        if not len(self._background):
            log.error("device_lost", reason=reason)
            self._background.start_own(self._leave())

    async def _leave(self) -> None:
        await self._outbox.stop()
        await self._monitor.stop()
        self._on_device_lost()

    async def stop(self) -> None:
        await self._heartbeats.stop()
        await self._service.stop()
        await self._jobs.close()
        await self._port.fetcher.close()
        await self._outbox.stop()
        await self._monitor.stop()
        await self._bus.close()

    def report(self) -> ProcessReport:
        return self._monitor.report()

    async def _on_command(
        self, command: ParkWorker | WakeWorker | ResizeKv | ChangeRoles | DrainWorker
    ) -> DrainState:
        """Raises InvalidRequest for what concerns a KV cache or other roles."""
        if not isinstance(command, DrainWorker):
            raise InvalidRequest(
                f"{self._bus.process_id} encodes images alone: it has no KV cache and no other role"
            )
        state = self._drained.drain(command)
        expected = "ready" if command.is_undone else "draining"
        if not self._is_leaving and self._monitor.state != expected:
            await self._monitor.transition_to("ready" if command.is_undone else "draining")
        return state

    def _on_tenant_kv(
        self, command: DropTenantKv | CountTenantKv
    ) -> TenantKvDropped | TenantKvCounted:
        """Forgets the encoded images of tenants: the worker has no KV of them."""
        if isinstance(command, CountTenantKv):
            return TenantKvCounted(num_cached_tokens=0, num_held_tokens=0)
        self._unretained.add(command)
        for tenant_id in command.tenant_ids:
            self._jobs.drop_tenant(tenant_id)
        busy = self._service.tenants().intersection(command.tenant_ids)
        return TenantKvDropped(num_blocks=0, busy_tenant_ids=tuple(sorted(busy)))


@dataclass(frozen=True, slots=True)
class LoadedAlone:
    encoder: ImageEncoder
    card: EncoderCard


async def load_alone(config: EncodeConfig) -> LoadedAlone:
    """Loads the encoder of a checkpoint. Raises ConfigError, CheckpointError."""
    vision = vision_of(config)
    if vision is None:
        raise takes_no_images(config)
    numerics, revision = await asyncio.to_thread(_identity, config)
    encoder = await load_image_encoder(config, vision, numerics.dtype)
    return LoadedAlone(encoder, encoder_card(config, revision, numerics))


def _identity(config: EncodeConfig) -> tuple[Numerics, str]:
    from shared.engine.vision.encoder_identity import (  # torch
        checkpoint_revision,
        encoder_numerics,
    )

    numerics = encoder_numerics(config)
    return numerics, checkpoint_revision(config.model_dir, numerics.dtype, config.load_format)


async def build_encode_worker(config: EncodeConfig) -> Service:
    """Connects, and loads the encoder, which may take minutes: others see that it starts. Raises
    ConfigError, CheckpointError, DependencyUnavailable.
    """
    check(config)
    times = StageTimes()
    times.add("imports", process_age_s())  # since the process began
    if vision_of(config) is None:
        raise takes_no_images(config)
    with times.stage("connect"):
        bus = await connect(config, "encode")
    clock, randomness = MonotonicClock(), SystemRandomness()
    numbers, roles = HeartbeatNumbers.random(randomness), WorkerRoles(("encode",))
    heartbeats = StartHeartbeats(
        bus, clock, numbers, roles, region=config.region, model=config.served_name
    )
    try:
        with bus.expecting_gaps():  # imports hold the event loop up
            await heartbeats.start()
            with times.stage("load"):
                loaded = await load_alone(config)
        monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=("encode",),
            region=config.region,
            numbers=numbers,
            loads=Loads(worker=lambda: load.load(service.num_unfinished)),
        )
        monitor.encoder = loaded.card
        port = await open_pixel_port(config, monitor.requests, bus.process_id, clock, randomness)
    except BaseException:
        await heartbeats.leave()
        await bus.close()
        raise
    cache = VectorCache(config.image_cache_bytes)
    outbox, unretained = Outbox(bus), UnretainedTenants(clock)
    jobs = ImageJobs(
        loaded.encoder,
        port.fetcher.fetch,
        cache,
        clock.now,
        lambda: None,
        unretained=unretained,
    )
    load = EncoderLoad(jobs)
    service = EncodeService(
        bus,
        outbox,
        monitor,
        clock,
        config=loaded.encoder.config,
        jobs=jobs,
        dialer=image_dialer(config),
        unretained=unretained,
    )
    log.info("encoder_loaded", **times.fields())
    return EncodeWorker(bus, outbox, monitor, heartbeats, service, jobs, port, unretained, clock)
