"""Composes a worker process: prefill handlers, decode handlers, or both over one engine; with
them those that encode images for other workers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
import structlog

from services.decode.service import DecodeService
from services.encode.service import EncodeService
from services.prefill.service import PrefillService
from services.worker.data_plane import CodecLoading, DataPlane, GroupDataPlane, ProcessDataPlane
from services.worker.gpu_health import watch_gpu
from services.worker.image_port import (
    load_image_encoder,
    open_images,
    takes_no_images,
    vision_of,
)
from services.worker.model_loading import (
    load_grammars,
    load_model,
    load_with_ranks,
    on_device,
)
from services.worker.role_and_standby import RoleAndStandby
from services.worker.step_profiles import StepProfiles
from shared.clock import Clock, MonotonicClock, process_age_s
from shared.config import WorkerConfig, check
from shared.engine.engine import Engine
from shared.engine.executors.executor import Executor
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.loading.freed_memory import use_one_arena
from shared.engine.features import features_of
from shared.engine.kv.ports import ReceivePort
from shared.engine.loop import EngineLoop
from shared.engine.step import KvMemory
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.engine.vision.image_encoder import ImageEncoder
from shared.engine.worker import EngineModel, EngineWorker
from shared.lifecycle.heartbeat_numbers import HeartbeatNumbers
from shared.lifecycle.identity import connect
from shared.lifecycle.process import DEVICE_LOST_STATUS, Service
from shared.lifecycle.start_heartbeats import StartHeartbeats
from shared.lifecycle.worker_roles import WorkerRoles
from shared.messages import WORKER_ROLES, KvTargets, ModelCard, Role
from shared.metrics.process_report import ProcessReport
from shared.randomness import Randomness, SystemRandomness
from shared.sites.kv_targets import kv_from_sites_problem
from shared.telemetry.stage_times import StageTimes
from shared.transport.bus import NatsBus

log = structlog.get_logger(__name__)

Handlers = PrefillService | DecodeService | EncodeService


class WorkerProcess:
    """The process of a worker. It becomes ready once all handlers serve, and leaves the fleet
    before they drain. `heartbeats` go on until its own have begun.
    """

    def __init__(
        self,
        worker: EngineWorker,
        handlers: list[Handlers],
        bus: NatsBus,
        heartbeats: StartHeartbeats,
        times: StageTimes,
    ) -> None:
        """`times` has the stages so far."""
        self._worker = worker
        self._times = times
        self._heartbeats = heartbeats
        self._handlers = handlers
        self._bus = bus
        self._role_and_standby = RoleAndStandby(worker, handlers)
        self._gpu_watch = watch_gpu(worker)
        self._profiles = StepProfiles(worker)

    async def start(self) -> None:
        with self._times.stage("join"):
            await self._worker.start()
            await self._heartbeats.stop()
        with self._times.stage("handlers"):
            for handler in self._handlers:
                await handler.start()
            await self._profiles.start()
            await self._role_and_standby.start()
        if self._gpu_watch is not None:
            self._gpu_watch.start()
        log.info("worker_started", **self._times.fields())

    async def drain(self) -> None:
        await self._role_and_standby.leave()
        await asyncio.gather(*(handler.drain() for handler in self._handlers))

    async def stop(self) -> None:
        if self._gpu_watch is not None:
            self._gpu_watch.stop()
        await self._profiles.stop()
        await self._heartbeats.stop()
        for handler in self._handlers:
            await handler.stop()
        await self._worker.stop()
        await self._bus.close()

    def report(self) -> ProcessReport:
        return self._worker.health_monitor.report()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A worker before its model is loaded: connected, with heartbeats that say that it starts."""

    config: WorkerConfig
    roles: WorkerRoles
    bus: NatsBus
    clock: Clock
    randomness: Randomness
    numbers: HeartbeatNumbers
    heartbeats: StartHeartbeats
    codec: CodecLoading
    times: StageTimes

    @property
    def samples(self) -> bool:
        return "decode" in self.roles.handled


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    executor: Executor
    grammars: WorkerGrammars | None
    encoder: ImageEncoder | None


async def build_worker(
    config: WorkerConfig,
    roles: tuple[Role, ...],
    load: Callable[..., Executor] | None = None,
    *,
    is_encoding: bool = False,
) -> Service:
    """Connects, and loads the model, which may take minutes: others see that it starts. With
    `is_encoding` it also encodes images for other workers. Raises ConfigError, CheckpointError,
    DependencyUnavailable.
    """
    check(config)
    if is_encoding and vision_of(config) is None:
        raise takes_no_images(config)
    start = await _connected(config, roles)
    try:
        model = await _load_parts(start, load)
        return await _compose(start, model, is_encoding=is_encoding)
    except BaseException:
        await start.heartbeats.leave()
        await start.bus.close()
        raise


async def _connected(config: WorkerConfig, roles: tuple[Role, ...]) -> _Start:
    times = StageTimes()
    times.add("imports", process_age_s())  # since the process began
    worker_roles = WorkerRoles(roles, WORKER_ROLES.get(config.announce, ()))
    if config.may_be_parked:
        use_one_arena()
    with times.stage("auto_device"):
        config = await asyncio.to_thread(on_device, config, roles)
    with times.stage("connect"):
        bus = await connect(config, roles[0])
    clock, randomness = MonotonicClock(), SystemRandomness()
    numbers = HeartbeatNumbers.random(randomness)
    heartbeats = StartHeartbeats(
        bus, clock, numbers, worker_roles, region=config.region, model=config.served_name
    )
    return _Start(
        config=config,
        roles=worker_roles,
        bus=bus,
        clock=clock,
        randomness=randomness,
        numbers=numbers,
        heartbeats=heartbeats,
        codec=_codec_loading(config),
        times=times,
    )


async def _load_parts(start: _Start, load: Callable[..., Executor] | None) -> _LoadedModel:
    """Loads the model with `load` (default: `load_model`, and with it the encoder of images)."""
    config, times = start.config, start.times
    encoder: ImageEncoder | None = None
    load_executor = load or partial(load_model, on_phase=start.heartbeats.enter, times=times)
    with start.bus.expecting_gaps():  # imports hold the event loop up
        await start.heartbeats.start()
        with times.stage("load"):
            executor = await load_with_ranks(config, start.bus, load_executor)
        with times.stage("grammars"):
            handled = start.roles.handled
            grammars = await asyncio.to_thread(load_grammars, config, executor, handled)
        if load is None and (vision := vision_of(config)) is not None:
            with times.stage("encoder"):
                encoder = await load_image_encoder(config, vision, executor.numerics.dtype)
    return _LoadedModel(executor, grammars, encoder)


async def _compose(start: _Start, model: _LoadedModel, *, is_encoding: bool) -> WorkerProcess:
    config, executor, times = start.config, model.executor, start.times
    engine = _engine(config, executor)
    data_plane = _data_plane(config, executor, start.clock, start.randomness, start.codec)
    receive_port = None
    if start.samples:
        with times.stage("receive_port"):
            receive_port = await data_plane.receive_port()
    site = _site_for_kv(config, () if receive_port is None else receive_port.targets)
    worker = _engine_worker(start, model, engine, receive_port, takes_kv_from_sites=bool(site))
    handlers: list[Handlers] = []
    if model.encoder is not None:
        images = worker, start.clock, start.randomness
        encoding = await open_images(config, model.encoder, *images, is_encoding=is_encoding)
        handlers += [] if encoding is None else [encoding]
    if "prefill" in start.roles.handled:
        with times.stage("push_port"):
            handlers.append(PrefillService(worker, await data_plane.push_port()))
    if receive_port is not None:
        handlers.append(DecodeService(worker, receive_port, model.grammars, site=site))
    return WorkerProcess(worker, handlers, start.bus, start.heartbeats, times)


def _engine_worker(
    start: _Start,
    model: _LoadedModel,
    engine: Engine,
    receive_port: ReceivePort | None,
    *,
    takes_kv_from_sites: bool,
) -> EngineWorker:
    features = features_of(
        has_vocabulary=model.grammars is not None or not start.samples,
        takes_kv_from_sites=takes_kv_from_sites,
        takes_images=model.encoder is not None,
    )
    return EngineWorker(
        bus=start.bus,
        clock=start.clock,
        randomness=start.randomness,
        loop=EngineLoop(engine, model.executor, start.clock),
        served=_served(start.config, model.executor, engine, features),
        roles=start.roles,
        region=start.config.region,
        kv_targets=() if receive_port is None else receive_port.targets,
        frame_counts=None if receive_port is None else receive_port.counts,
        on_device_lost=lambda: os._exit(DEVICE_LOST_STATUS),
        max_pinned_share=start.config.max_pinned_share,
        numbers=start.numbers,
    )


def _site_for_kv(config: WorkerConfig, targets: KvTargets) -> str:
    """Returns the name of this worker's site, or "" if no other site may push KV to the worker."""
    if not config.site or not targets:
        return ""
    problem = kv_from_sites_problem(config.data_plane_security, targets)
    if problem is None:
        return config.site
    log.warning("no_kv_from_sites", reason=problem)
    return ""


def _codec_loading(config: WorkerConfig) -> CodecLoading:
    """Returns the codec of KV. On CUDA its loading has begun, on cores that are idle. On a CPU the
    model's own kernels, which are compiled first, include it. Ranks load their own.
    """
    codec = CodecLoading(config.kv_compression)
    if config.device.startswith("cuda") and not config.has_ranks:
        codec.begin()
    return codec


def _data_plane(
    config: WorkerConfig,
    executor: Executor,
    clock: Clock,
    randomness: Randomness,
    codec: CodecLoading,
) -> DataPlane:
    if isinstance(executor, GroupExecutor):
        return GroupDataPlane(config, executor.kv_links, randomness)
    return ProcessDataPlane(config, cast(KvMemory, executor), clock, randomness, codec)


def _engine(config: WorkerConfig, executor: Executor) -> Engine:
    assert config.max_batch_tokens is not None, "set by `on_device`"
    num_floor_blocks = executor.num_blocks
    if config.kv_floor_bytes is not None:
        num_floor_blocks = config.kv_floor_bytes // executor.kv_layout.block_bytes
    return Engine(
        num_blocks=0 if config.is_parked else executor.num_blocks,
        num_floor_blocks=num_floor_blocks,
        block_size=executor.kv_layout.block_size,
        max_context_tokens=executor.max_context_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_reserved_share=config.max_reserved_share,
        reaches=executor.kv_layout.reaches,
        zeroes_freed_blocks=config.zero_freed_blocks,
    )


def _served(
    config: WorkerConfig, executor: Executor, engine: Engine, features: tuple[str, ...]
) -> EngineModel:
    card = ModelCard(
        name=config.served_name,
        revision=executor.revision,
        kv_format=executor.kv_layout.key,
        block_size=executor.kv_layout.block_size,
        max_context_tokens=engine.max_context_tokens,
        vocab_size=executor.vocab_size,
        kv_bytes_per_token=executor.kv_layout.bytes_per_token,
        kv_reaches=executor.kv_layout.reaches,
        model_context_tokens=engine.model_context_tokens,
        numerics=executor.numerics,
        features=features,
        step_launch=executor.step_launch or msgspec.UNSET,
    )
    return EngineModel(
        card=card, eos_token_ids=frozenset(executor.eos_token_ids), has_head=executor.has_head
    )
