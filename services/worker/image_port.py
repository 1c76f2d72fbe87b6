"""Opens what a worker of a model with images needs: its encoder, and a port for pixels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.encode.service import EncodeService
from services.worker.data_plane import data_plane_security, link_keys_of, receive_kv
from shared.clock import Clock
from shared.config import EncodeConfig, WorkerConfig
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.vision.encoder_choice import encoder_key
from shared.engine.vision.image_encoder import ImageEncoder, ThreadedEncoder
from shared.engine.vision.image_jobs import ImageJobs
from shared.engine.vision.remote_vectors import RemoteVectors, VectorForm
from shared.engine.vision.vector_cache import VectorCache
from shared.engine.vision.worker_images import WorkerImages
from shared.engine.worker import EngineWorker
from shared.errors import ConfigError
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import EncoderCard
from shared.numerics import Numerics
from shared.pixels.pixel_fetcher import PixelFetcher
from shared.randomness import Randomness
from shared.transport.timed_requests import TimedRequests


def vision_of(config: EncodeConfig) -> VisionConfig | None:
    """Returns the encoder of the worker's model; None if the model takes no images."""
    return read_config(config.model_dir).vision


def takes_no_images(config: EncodeConfig) -> ConfigError:
    """Returns the error of a model without an encoder, for a process that is to encode."""
    return ConfigError(f"model_dir {config.model_dir}: the model takes no images to encode")


def encoder_card(config: EncodeConfig, revision: str, numerics: Numerics) -> EncoderCard:
    return EncoderCard(model=config.served_name, key=encoder_key(revision, numerics))


async def load_image_encoder(
    config: EncodeConfig, vision: VisionConfig, dtype: str
) -> ImageEncoder:
    """Loads the encoder in the model's dtype. Raises CheckpointError, ConfigError."""
    from shared.engine.vision.load_encoder import load_encoder  # torch

    loaded = await asyncio.to_thread(
        load_encoder,
        config.model_dir,
        vision,
        dtype,
        device=config.device,
        load_format=config.load_format,
        num_threads=config.num_threads or None,
    )
    return ThreadedEncoder(loaded)


@dataclass(frozen=True, slots=True)
class PixelPort:
    """Where pixels and vectors arrive, and what fetches pixels there."""

    receiver: KvServer
    link_keys: LinkKeys | None
    fetcher: PixelFetcher


async def open_pixel_port(
    config: EncodeConfig,
    requests: TimedRequests,
    worker_id: str,
    clock: Clock,
    randomness: Randomness,
) -> PixelPort:
    """Listens beside the KV. Raises ConfigError for an address that is not this host's."""
    link_keys = link_keys_of(data_plane_security(config), randomness)
    receiver = await receive_kv(
        config, randomness.bytes(16), None, link_keys, port=config.pixel_port
    )
    fetcher = PixelFetcher(requests, worker_id, receiver, link_keys, clock, randomness)
    return PixelPort(receiver, link_keys, fetcher)


def image_dialer(config: EncodeConfig) -> Dialer:
    """Returns what pushes vectors to other workers."""
    return Dialer(security=data_plane_security(config), region=config.region)


async def open_images(
    config: WorkerConfig,
    encoder: ImageEncoder,
    worker: EngineWorker,
    clock: Clock,
    randomness: Randomness,
    *,
    is_encoding: bool = False,
) -> EncodeService | None:
    """Has the worker take images. Returns the handlers that encode those of other workers, if it
    `is_encoding`. Raises ConfigError for an address that is not this host's.
    """
    monitor, card = worker.health_monitor, worker.served.card
    port = await open_pixel_port(config, monitor.requests, worker.worker_id, clock, randomness)
    own = encoder_card(config, card.revision, card.numerics)
    remote = RemoteVectors(
        worker.bus,
        worker.outbox,
        monitor,
        port.receiver,
        port.link_keys,
        clock,
        randomness,
        form=VectorForm(own.key, encoder.config, encoder.vector_bytes),
        roles=worker.roles.handled,
    )
    jobs = ImageJobs(
        encoder,
        port.fetcher.fetch,
        VectorCache(config.image_cache_bytes),
        clock.now,
        worker.loop.wake,
        remote.fetch,
        worker.tenant_kv.unretained,
    )
    jobs.on_device_lost(worker.loop.fence)
    worker.use_images(
        WorkerImages(encoder.config, jobs, port.fetcher, encoder.vector_bytes, remote)
    )
    if not is_encoding:
        return None
    monitor.encoder = own
    return EncodeService(
        worker.bus,
        worker.outbox,
        monitor,
        clock,
        config=encoder.config,
        jobs=jobs,
        dialer=image_dialer(config),
        unretained=worker.tenant_kv.unretained,
    )
