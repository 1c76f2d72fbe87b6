"""The GPU of a worker: its health is in the heartbeats, and a fault makes the worker leave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch

from services.worker.gpu_health import watch_gpu
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.messages import Heartbeat
from tests.shared.device_health.fake_nvml import UUID, FakeNvml
from tests.support.waiting import LIMIT_S, until
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import SimulatedWorker


def worker_on(gpu_uuid: str) -> SimulatedWorker:
    host = SimulatedWorker(SimulatedNetwork(), DataPlane(), "decode-1", ("decode",))
    host.executor.gpu_uuid = gpu_uuid
    return host


async def test_fault_is_in_the_heartbeats_and_ends_the_worker() -> None:
    worker, nvml, lost = worker_on(UUID).worker, FakeNvml(), asyncio.Event()
    worker.loop.on_device_lost(lost.set)
    watch = watch_gpu(worker, lambda: nvml)
    assert watch is not None

    def described() -> Heartbeat:
        return worker.health_monitor.describe()

    assert described().load.device_health is None  # nothing is known yet
    watch.start()
    nvml.clocks = nvml.nvmlClocksEventReasonHwThermalSlowdown
    await until(lambda: described().load.device_health)
    nvml.xid(79)
    await asyncio.wait_for(lost.wait(), LIMIT_S)
    health = described().load.device_health
    assert (health.num_xids, health.throttles) == (1, ("hw_thermal",))
    assert health.fault.startswith("Xid 79")


async def test_worker_without_a_gpu_is_not_watched() -> None:
    worker = worker_on("").worker
    assert watch_gpu(worker) is None
    assert worker.health_monitor.describe().load.device_health is None


def test_gpu_is_found_by_its_uuid_whatever_its_index() -> None:
    """With CUDA_VISIBLE_DEVICES, CUDA and NVML count devices differently."""
    driver = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(uuid=f"8a2c-{index}")
    )
    assert CudaDevice(1, torch.device("cpu"), driver).uuid == "GPU-8a2c-1"
