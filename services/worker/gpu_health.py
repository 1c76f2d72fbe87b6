"""Watches the GPU of a worker: its heartbeats say what is wrong, and a fault ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shared.device_health.device_watch import DeviceWatch
from shared.device_health.nvml_device import NvmlDevice, load_nvml
from shared.engine.worker import EngineWorker
from shared.messages import WorkerLoad


def watch_gpu(worker: EngineWorker, nvml: Callable[[], Any] = load_nvml) -> DeviceWatch | None:
    """Returns the watch, not started, or None for a worker that is not on one GPU."""
    uuid, loop = worker.loop.executor.gpu_uuid, worker.loop
    if not uuid:
        return None
    watch = DeviceWatch(lambda: NvmlDevice(uuid, nvml()), worker.clock, loop.fence)

    def add_health(load: WorkerLoad) -> WorkerLoad:
        return replace(load, device_health=watch.health())

    worker.count(add_health)
    return watch
