"""Composes a worker process: prefill handlers, decode handlers, or both over one engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from socket import gethostname
from typing import Any, Protocol, cast

import structlog

from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from services.rank.leader import listening_for_ranks
from shared.clock import MonotonicClock
from shared.config import WorkerConfig, check
from shared.engine.engine import Engine
from shared.engine.features import features_of
from shared.engine.grammar.mask_lanes import MaskLanes
from shared.engine.grammar.worker_grammars import WorkerGrammars
from shared.engine.loop import EngineLoop
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostListener
from shared.engine.runner import Runner
from shared.engine.worker import EngineWorker, ServedModel
from shared.errors import CheckpointError, ConfigError, DependencyUnavailable
from shared.grammar.vocabulary import load_vocabulary
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.dialer import DataPlaneSecurity, Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.lifecycle.identity import connect
from shared.lifecycle.process import Service
from shared.messages import ModelCard, Role
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus

log = structlog.get_logger(__name__)

DEVICE_LOST_STATUS = 3  # of the process: a supervisor starts it again, with growing pauses


class ModelledRunner(Runner, Protocol):
    """A runner with a model: adds the revision and the EOS token ids that the worker serves."""

    revision: str
    eos_token_ids: tuple[int, ...]


class WorkerProcess:
    """Becomes ready once all handlers serve; leaves the fleet before they drain."""

    def __init__(
        self, worker: EngineWorker, handlers: list[PrefillService | DecodeService], bus: NatsBus
    ) -> None:
        self._worker = worker
        self._handlers = handlers
        self._bus = bus

    async def start(self) -> None:
        await self._worker.start()
        for handler in self._handlers:
            await handler.start()
        await self._worker.health_monitor.transition_to("ready")

    async def drain(self) -> None:
        await self._worker.health_monitor.transition_to("draining")
        await asyncio.gather(*(handler.drain() for handler in self._handlers))

    async def stop(self) -> None:
        for handler in self._handlers:
            await handler.stop()
        await self._worker.stop()
        await self._bus.close()


def load_model(config: WorkerConfig, hosts: HostListener | None = None) -> ModelledRunner:
    """`hosts`: those of the last ranks. Raises CheckpointError, ConfigError."""
    # torch: other runners do not need it
    from shared.engine.runners.load import load_runner

    options: dict[str, Any] = {
        "dtype": config.dtype,
        "block_size": config.block_size,
        "kv_cache_bytes": config.kv_cache_bytes,
        "max_batch_tokens": config.max_batch_tokens,
        "max_sequences": config.max_sequences,
        "load_format": config.load_format,
        "num_threads": config.num_threads or None,
        "mode": config.mode,
        "activations": config.activations,
        "weights": config.weights,
        "has_row_kernels": True,
    }
    shape = MeshShape(config.tp, config.pp)
    if shape.num_ranks == 1:
        return load_runner(config.model_dir, config.device, **options)
    from shared.engine.ranks.load_group import load_group

    return load_group(config.model_dir, config.device, shape, hosts, **options)


def on_device(config: WorkerConfig, roles: tuple[Role, ...]) -> WorkerConfig:
    """Returns the config with the device resolved and its defaults. Raises ConfigError."""
    device = config.device
    if device == "auto":
        from shared.engine.runners.load import resolve_device  # imports torch

        device = resolve_device(device).type
    return config.with_defaults_of(device, is_prefill_only="decode" not in roles)


def load_codec(config: WorkerConfig, dtype: str) -> FrameCodec | None:
    """Returns the compiled codec for KV over TCP. None for another dtype than BF16, if compression
    is off, or if the host cannot compile the codec.
    """
    if config.kv_compression == "off" or dtype != "bfloat16":
        return None
    try:
        from shared.engine.kv_codec import Bf16FrameCodec  # imports numba, not needed by others

        return Bf16FrameCodec()
    except DependencyUnavailable as error:  # a CPU runner has already warned
        log.info("kv_codec_unavailable", reason=error.message)
        return None
    except Exception:
        log.exception("kv_codec_unavailable")
        return None


def load_grammars(
    config: WorkerConfig, runner: ModelledRunner, roles: tuple[Role, ...]
) -> WorkerGrammars | None:
    """None for a worker that samples no tokens, or whose vocabulary grammars cannot use."""
    if "decode" not in roles:
        return None
    try:
        vocabulary = load_vocabulary(
            config.model_dir, vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids
        )
    except CheckpointError as error:
        log.warning("grammars_unavailable", reason=error.message)
        return None
    return WorkerGrammars(vocabulary, MaskLanes())


async def receive_kv(
    config: WorkerConfig, instance_id: bytes, codec: FrameCodec | None, link_keys: LinkKeys | None
) -> KvServer:
    """Listens for KV. Raises ConfigError for an address that is not this host's."""
    try:
        return await KvServer.start(
            instance_id=instance_id,
            bind_host=config.data_plane_host,
            advertised_host=_advertised_host(config),
            codec=codec,
            link_keys=link_keys,
        )
    except OSError as error:
        reason = f"cannot receive KV on {config.data_plane_host!r}: {error}"
        raise ConfigError(f"data_plane_host: {reason}") from error


def data_plane_security(config: WorkerConfig) -> DataPlaneSecurity:
    """The configured one. Warns of an open data plane off loopback."""
    security = cast(DataPlaneSecurity, config.data_plane_security)  # checked with the config
    if security == "none" and not config.is_on_loopback:
        log.warning("kv_data_plane_unprotected", listens_on=config.data_plane_host)
    return security


async def build_worker(
    config: WorkerConfig,
    roles: tuple[Role, ...],
    load: Callable[..., ModelledRunner] = load_model,
) -> Service:
    """Loads the model and connects. Raises ConfigError, CheckpointError, DependencyUnavailable."""
    check(config)
    config = await asyncio.to_thread(on_device, config, roles)
    await (await connect(config, roles[0])).close()  # loading may take minutes
    async with listening_for_ranks(config, roles[0]) as hosts:
        arguments = () if hosts is None else (hosts,)
        runner = await asyncio.to_thread(load, config, *arguments)
    codec = await asyncio.to_thread(load_codec, config, runner.kv_layout.dtype)
    grammars = await asyncio.to_thread(load_grammars, config, runner, roles)
    bus = await connect(config, roles[0])
    clock, randomness = MonotonicClock(), SystemRandomness()
    engine = _engine(config, runner)
    security = data_plane_security(config)
    link_keys = None if security == "none" else LinkKeys(security, randomness)
    receiver = None
    if "decode" in roles:
        try:
            receiver = await receive_kv(config, randomness.bytes(16), codec, link_keys)
        except ConfigError:
            await bus.close()
            raise
    worker = EngineWorker(
        bus=bus,
        clock=clock,
        randomness=randomness,
        loop=EngineLoop(engine, runner, clock),
        served=_served(
            config,
            runner,
            engine,
            features_of(has_vocabulary=grammars is not None or "decode" not in roles),
        ),
        roles=roles,
        region=config.region,
        data_plane=None if receiver is None else receiver.address,
        frame_counts=None if receiver is None else receiver.counts,
        on_device_lost=lambda: os._exit(DEVICE_LOST_STATUS),
        max_pinned_share=config.max_pinned_share,
    )
    handlers: list[PrefillService | DecodeService] = []
    if "prefill" in roles:
        handlers.append(PrefillService(worker, Dialer(codec=codec, security=security)))
    if receiver is not None:
        handlers.append(DecodeService(worker, receiver, link_keys, grammars))
    return WorkerProcess(worker, handlers, bus)


def _engine(config: WorkerConfig, runner: ModelledRunner) -> Engine:
    assert config.max_batch_tokens is not None, "set by `on_device`"
    return Engine(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_context_tokens=runner.max_context_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_reserved_share=config.max_reserved_share,
        reaches=runner.kv_layout.reaches,
        zeroes_freed_blocks=config.zero_freed_blocks,
    )


def _advertised_host(config: WorkerConfig) -> str | None:
    """The host's own name where KV is received on all interfaces: replicas differ in nothing else.
    None: the listen address.
    """
    if config.data_plane_advertised_host or config.data_plane_host not in ("0.0.0.0", "::"):
        return config.data_plane_advertised_host or None
    return gethostname()


def _served(
    config: WorkerConfig, runner: ModelledRunner, engine: Engine, features: tuple[str, ...]
) -> ServedModel:
    card = ModelCard(
        name=config.served_name,
        revision=runner.revision,
        kv_format=runner.kv_layout.key,
        block_size=config.block_size,
        max_context_tokens=engine.max_context_tokens,
        vocab_size=runner.vocab_size,
        kv_bytes_per_token=runner.kv_layout.bytes_per_token,
        kv_reaches=runner.kv_layout.reaches,
        model_context_tokens=engine.model_context_tokens,
        numerics=runner.numerics,
        features=features,
    )
    return ServedModel(card=card, eos_token_ids=frozenset(runner.eos_token_ids))
