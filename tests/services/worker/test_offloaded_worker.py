"""A worker over NATS whose executor is a CUDA device's, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.worker.worker import build_worker
from shared.config import WorkerConfig
from shared.engine.executors.cuda import cuda_executor, cuda_load
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.errors import NoCapacity
from tests.shared.engine.executors.cuda.fake_device import Replays, load
from tests.support.engine.device_forms import use_device_forms
from tests.support.servers import NatsServer
from tests.support.services.parked_worker import WorkerClient

KV_BYTES = 8 << 20
PROMPT = [10 + 7 * index % 1000 for index in range(100)]


async def test_worker_that_finds_no_memory_stays_parked_and_is_asked_again(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device_forms(monkeypatch)
    monkeypatch.setattr(cuda_load, "run_largest_step", lambda *_: None)
    executors: list[CudaExecutor] = []

    def loaded(_: WorkerConfig) -> CudaExecutor:
        options: dict[str, Any] = {"kv_cache_bytes": KV_BYTES, "parked_weights": "host"}
        executors.append(load(DEMO_MODEL_DIR, Replays(), **options))
        return executors[0]

    def allocate(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = WorkerConfig(
        nats_url=nats_server.url("worker-1"),
        process_id="worker-1",
        model_dir=DEMO_MODEL_DIR,
        device="cpu",
        num_threads=1,
        kv_floor_bytes=KV_BYTES // 4,
    )
    service = await build_worker(config, ("prefill", "decode"), loaded)
    await service.start()
    client = await WorkerClient.connect(nats_server)
    await client.until_state("ready")
    expected = await client.complete(PROMPT)
    await client.park()
    heartbeat = await client.until_state("standby")
    assert heartbeat.load is not None
    assert heartbeat.load.offloaded_bytes == executors[0].offloaded_bytes > 0
    with monkeypatch.context() as patched:
        allocated = cuda_executor.allocate_kv_cache
        patched.setattr(
            cuda_executor,
            "allocate_kv_cache",
            lambda layout, num, on: allocate() if num else allocated(layout, num, on),
        )
        with pytest.raises(NoCapacity, match="MiB of weights and 7 MiB of KV do not fit"):
            await client.wake(KV_BYTES)
    assert client.states[-1] == "standby"
    await client.wake(KV_BYTES)
    assert await client.complete(PROMPT) == expected
    await client.close()
    await service.drain()
    await service.stop()
