"""The options of a worker that a host starts. No I/O."""

from __future__ import annotations

import re
from pathlib import Path

from services.host.budget import ModelKey, ModelMemory
from services.host.device_models import DeviceModels
from services.host.hosted_revisions import HostedRevision
from shared.config import HostConfig, WorkerConfig
from shared.nats_urls import user_of
from shared.sizes import shortest_size

DRAIN_S = 60.0  # the time for a stopping worker to finish its requests
MAX_NAME = 40
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


def worker_id_of(worker_nats_url: str, model: str, suffix: str) -> str:
    """Returns a process id of the workers' credential and an instance that names the model."""
    name = _NOT_IN_NAMES.sub("-", model)[:MAX_NAME]
    return f"{user_of(worker_nats_url) or 'worker'}.{name}-{suffix}"


def log_name_of(key: ModelKey) -> str:
    """Returns the name of the log file that all starts of a model share."""
    return "-".join(_NOT_IN_NAMES.sub("-", each)[:MAX_NAME] for each in (key.name, key.revision))


def worker_config(
    host: HostConfig,
    hosted: HostedRevision,
    memory: ModelMemory,
    worker_id: str,
    device: DeviceModels,
    kv_bytes: int | None,
) -> WorkerConfig:
    """Returns the config of a worker. Its cache begins with `kv_bytes`; None: it starts
    in standby. On a CUDA device it never takes more than the whole budget.
    """
    assert hosted.source is not None
    floor = memory.kv_floor_bytes
    return WorkerConfig(
        nats_url=host.worker_nats_url,
        nats_ca=host.nats_ca,
        nats_cert=host.nats_cert,
        nats_key=host.nats_key,
        is_nats_tls_first=host.is_nats_tls_first,
        process_id=worker_id,
        region=host.region,
        region_classes=host.region_classes,
        drain_timeout_s=DRAIN_S,
        log_level=host.log_level,
        log_format=host.log_format,
        model_dir=Path(hosted.source.model_dir),
        model_name=hosted.key.name,
        weights=hosted.model.weights,
        kv_dtype=hosted.model.kv_dtype,
        device=device.name,
        gpu_memory="" if device.name == "cpu" else shortest_size(device.budget_bytes),
        num_threads=host.num_threads,
        block_size=hosted.source.block_size,
        kv_cache_bytes=floor if kv_bytes is None else kv_bytes,
        kv_floor_bytes=floor,
        kv_ceiling_bytes=int(memory.kv_ceiling_bytes),
        max_context_tokens=hosted.source.max_context_tokens,
        is_parked=kv_bytes is None,
        parked_weights="host" if memory.offloaded_bytes else "device",
        data_plane_host=host.data_plane_host,
        data_plane_advertised_host=host.data_plane_advertised_host,
        data_plane_security=host.data_plane_security,
        site=host.site,
    )
