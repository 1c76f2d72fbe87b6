"""Opens what a worker of a model with images needs: its encoder, and a port for pixels."""

from __future__ import annotations

import asyncio

from services.worker.data_plane import data_plane_security, link_keys_of, receive_kv
from shared.clock import Clock
from shared.config import WorkerConfig
from shared.engine.executors.executor import Executor
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.vision.image_encoder import ImageEncoder, ThreadedEncoder
from shared.engine.vision.image_jobs import ImageJobs
from shared.engine.vision.vector_cache import VectorCache
from shared.engine.vision.worker_images import WorkerImages
from shared.engine.worker import EngineWorker
from shared.kv_wire.kv_server import KvServer
from shared.pixels.pixel_fetcher import PixelFetcher
from shared.randomness import Randomness


def vision_of(config: WorkerConfig) -> VisionConfig | None:
    """Returns the encoder of the worker's model; None if the model takes no images."""
    return read_config(config.model_dir).vision


async def load_image_encoder(
    config: WorkerConfig, vision: VisionConfig, executor: Executor
) -> ImageEncoder:
    """Loads the encoder beside the model, in the model's dtype. Raises CheckpointError."""
    from shared.engine.vision.load_encoder import load_encoder  # torch

    loaded = await asyncio.to_thread(
        load_encoder,
        config.model_dir,
        vision,
        executor.numerics.dtype,
        device="cuda" if config.device.startswith("cuda") else "cpu",
        load_format=config.load_format,
        num_threads=config.num_threads or None,
    )
    return ThreadedEncoder(loaded)


async def open_images(
    config: WorkerConfig,
    encoder: ImageEncoder,
    worker: EngineWorker,
    clock: Clock,
    randomness: Randomness,
) -> WorkerImages:
    """Listens for pixels beside the KV. Raises ConfigError for an address that is not this
    host's.
    """
    security = data_plane_security(config)
    link_keys = link_keys_of(security, randomness)
    receiver: KvServer = await receive_kv(
        config, randomness.bytes(16), None, link_keys, port=config.pixel_port
    )
    fetcher = PixelFetcher(
        worker.health_monitor.requests, worker.worker_id, receiver, link_keys, clock, randomness
    )
    jobs = ImageJobs(
        encoder,
        fetcher.fetch,
        VectorCache(config.image_cache_bytes),
        clock.now,
        worker.loop.wake,
    )
    return WorkerImages(encoder.config, jobs, fetcher, encoder.vector_bytes)
