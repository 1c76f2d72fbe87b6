"""A prefill and a decode worker on a real NATS server, with the timing engine and no gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.worker.worker import WorkerProcess, build_worker
from shared.block_hash import extend_chain, root_hash
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import TimingExecutor
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    Choice,
    DataPlaneAddress,
    DecodeStarted,
    Finish,
    KvTargets,
    PlacementId,
    Request,
    Role,
    RunPrefill,
    SamplingParams,
    StartDecode,
    TokenBatch,
)
from shared.packing import pack_hashes, pack_token_ids
from shared.randomness import SystemRandomness
from shared.subjects import start_decode, tokens
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.waiting import until

BLOCK_SIZE, NUM_BLOCKS = 16, 64
DEADLINE_S = 20.0
MODEL, REVISION = "timing", "r1"


class LiveExecutor(TimingExecutor):
    revision = REVISION
    eos_token_ids = ()
    has_head = True


@dataclass
class LiveWorkers:
    nats: NatsServer
    scheduler: NatsBus
    gateway: NatsBus
    monitor: HealthMonitor  # the gateway's monitor
    processes: dict[str, WorkerProcess]
    executors: dict[str, TimingExecutor]
    batches: list[TokenBatch] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_format(self) -> str:
        return self.executors["decode-1"].kv_layout.key

    @property
    def data_plane(self) -> DataPlaneAddress:
        return self.targets[0].address

    @property
    def targets(self) -> KvTargets:
        return self.processes["decode-1"]._worker.kv_targets

    async def place(self, request: Request, *, placement_id: PlacementId = b"p" * 16) -> None:
        command = StartDecode(
            placement_id=placement_id, request=request, prefill_candidates=("prefill-1",)
        )
        await self.scheduler.request(
            start_decode("decode-1"), command, DecodeStarted, timeout_s=DEADLINE_S
        )

    async def finish(self) -> Finish:
        """Waits for the end of the one running choice and returns it."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for batch in self.batches:
                    for entry in batch.entries:
                        if entry.finish is not None:
                            return entry.finish
                self.arrived.clear()
                await self.arrived.wait()

    def _on_tokens(self, batch: TokenBatch) -> None:
        self.batches.append(batch)
        self.arrived.set()


@asynccontextmanager
async def live_workers(
    nats: NatsServer, folder: Path, *, advertised_host: str = "", security: str = "aead"
) -> AsyncIterator[LiveWorkers]:
    """Runs a prefill and a decode worker with timing engines.

    If the decode worker advertises a host, it has no unix socket.
    """
    executors: dict[str, TimingExecutor] = {}
    processes: dict[str, WorkerProcess] = {}

    async def start(worker_id: str, role: Role) -> None:
        def load(config: WorkerConfig) -> LiveExecutor:
            executor = LiveExecutor(MonotonicClock(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            executors[worker_id] = executor
            return executor

        config = WorkerConfig(
            nats_url=nats.url(worker_id),
            process_id=worker_id,
            model_dir=folder,
            model_name=MODEL,
            device="cpu",
            block_size=BLOCK_SIZE,
            data_plane_advertised_host=advertised_host,
            data_plane_security=security,
        )
        process = await build_worker(config, (role,), load)
        assert isinstance(process, WorkerProcess)
        processes[worker_id] = process
        await process.start()

    gateway = await NatsBus.connect(nats.url("gateway-1"), process_id="gateway-1")
    scheduler = await NatsBus.connect(nats.url("scheduler-1"), process_id="scheduler-1")
    monitor = HealthMonitor(gateway, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    await monitor.start()
    await monitor.transition_to("ready")
    await start("prefill-1", "prefill")
    await start("decode-1", "decode")
    it = LiveWorkers(nats, scheduler, gateway, monitor, processes, executors)
    if advertised_host:
        os.unlink(it.data_plane.unix_path)  # noqa: PTH108
    await gateway.subscribe(tokens("gateway-1"), TokenBatch, it._on_tokens)
    await gateway.flush()
    await until(lambda: accepts_work(processes["prefill-1"], "decode-1", "decode"))
    try:
        yield it
    finally:
        for process in processes.values():
            await process.stop()
        await monitor.stop()
        await gateway.close()
        await scheduler.close()


def accepts_work(observer: WorkerProcess, worker_id: str, role: Role) -> bool:
    """Whether `observer` knows that this worker's handlers serve."""
    fleet = observer._worker.health_monitor.fleet
    return any(each.process_id == worker_id for each in fleet.live(role))


def request_of(prompt: list[int], *, root: bytes | None = None) -> Request:
    root = root_hash("tenant-a", REVISION) if root is None else root
    return Request(
        request_id="r",
        tenant_id="tenant-a",
        gateway_id="gateway-1",
        model=MODEL,
        revision=REVISION,
        cache_root=root,
        prompt_token_ids=pack_token_ids(prompt),
        block_hashes=pack_hashes(extend_chain(root, prompt, BLOCK_SIZE)),
        sampling=SamplingParams(seed=1, max_tokens=4, temperature=0.0),
        choices=(Choice(choice_index=0),),
        deadline_s=60.0,
    )


def run_prefill_of(it: LiveWorkers, prompt: list[int], **changes: object) -> RunPrefill:
    """Returns a right command of decode-2, which has no worker process, except for the changes."""
    root = root_hash("tenant-a", REVISION)
    command = RunPrefill(
        request_id="r",
        placement_id=b"f" * 16,
        tenant_id="tenant-a",
        decode_worker_id="decode-2",
        model=MODEL,
        revision=REVISION,
        kv_format=it.kv_format,
        cache_root=root,
        token_ids=pack_token_ids(prompt),
        block_hashes=pack_hashes(extend_chain(root, prompt, BLOCK_SIZE)),
        first_token=0,
        targets=it.targets,
        lease_s=3.0,
        deadline_s=60.0,
        numerics=it.executors["prefill-1"].numerics,
    )
    return msgspec.structs.replace(command, **changes)
