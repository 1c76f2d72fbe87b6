"""Monitored clusters with known undisturbed responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from services.client.hearth_nats import HearthClient
from tests.chaos.chaos import Chaos
from tests.chaos.checks.monitor import Monitor
from tests.chaos.frames import WORKERS_APART, relays
from tests.chaos.world.pictures import write_seeing_model
from tests.chaos.world.relay import Relay, Transport
from tests.chaos.world.workload import NUM_STREAMS
from tests.support.cluster.chaos_cluster import SERVICES, ChaosCluster

TIMING_STEP_S = 0.015
NUM_BLOCKS = 2048
BLOCK_BYTES = 256  # of the timing engine
MODEL_BLOCK_BYTES = 49152  # of the demo model
WORKERS = {"kv-cache-bytes": str(NUM_BLOCKS * BLOCK_BYTES), "max-batch-tokens": "256"}
# Two workers of two ranks each; a stream that loses one continues at a worker of one process.
RANKS = {"prefill-1": {"tp": "2"}, "decode-1": {"tp": "2"}}
ENCODERS = ("encode-1", "encode-2")
SEEING_KV_BYTES = 64 << 20  # of the model that takes images
NUM_SEEING_STREAMS = NUM_STREAMS // 2
# Nothing is killed while frames are spoilt: a spare of decode takes what is computed again.
OF_FRAMES = ("kv_index-1", "scheduler-1", "prefill-1", "decode-1", "decode-2", "gateway-1")
FRAMES_STEP_S = 0.005  # no fault waits for a phase of the streams
SHORT_CHUNKS = {"max-batch-tokens": "32"}  # so that a prompt takes several frames


@contextlib.asynccontextmanager
async def running_chaos(
    folder: Path,
    workers: dict[str, str] = WORKERS,
    *,
    is_model: bool = False,
    is_nats: bool = False,
    is_constrained: bool = False,
    has_ranks: bool = False,
    has_images: bool = False,
    num_streams: int | None = None,
) -> AsyncIterator[Chaos]:
    """`is_nats`: clients send their requests over NATS. `is_constrained`, `num_streams`: as of
    `Chaos`. `has_ranks`: some workers of the demo model have several ranks. `has_images`: a small
    model that takes images, with two encode workers.
    """
    async with AsyncExitStack() as stack:
        options_of = RANKS if has_ranks else {}
        if has_images:
            started = _started_seeing(folder, workers)
        else:
            started = _started(folder, workers, is_model=is_model, options_of=options_of)
        cluster, monitor = await stack.enter_async_context(started)
        nats = None
        if is_nats:
            nats = await HearthClient.connect(cluster.client_url)
            stack.push_async_callback(nats.close)
        running = Chaos(
            cluster,
            monitor,
            nats,
            is_constrained=is_constrained,
            has_images=has_images,
            num_streams=num_streams or (NUM_SEEING_STREAMS if has_images else NUM_STREAMS),
        )
        await running.learn()
        yield running


@contextlib.asynccontextmanager
async def running_frames(
    folder: Path,
    transport: Transport,
    *,
    is_model: bool = False,
    num_streams: int = NUM_STREAMS,
) -> AsyncIterator[tuple[Chaos, list[Relay]]]:
    """With an inactive relay in front of each decode worker."""
    workers = {**WORKERS, **SHORT_CHUNKS, **(WORKERS_APART if transport == "tcp" else {})}
    async with (
        _started(folder, workers, OF_FRAMES, is_model=is_model, step_s=FRAMES_STEP_S) as (
            cluster,
            monitor,
        ),
        relays(cluster, monitor, transport) as frame_relays,
    ):
        running = Chaos(cluster, monitor, num_streams=num_streams)
        await running.learn()
        yield running, frame_relays


@contextlib.asynccontextmanager
async def _started(
    folder: Path,
    workers: dict[str, str],
    services: Iterable[str] = SERVICES,
    *,
    is_model: bool,
    step_s: float = TIMING_STEP_S,
    options_of: Mapping[str, Mapping[str, str]] = {},
) -> AsyncIterator[tuple[ChaosCluster, Monitor]]:
    of_model = {"kv-cache-bytes": str(NUM_BLOCKS * MODEL_BLOCK_BYTES)} if is_model else {}
    cluster = ChaosCluster(
        folder,
        step_s=None if is_model else step_s,
        worker_options={**workers, **of_model},
        services=services,
        options_of=options_of,
    )
    async with _monitored(cluster) as monitor:
        yield cluster, monitor


@contextlib.asynccontextmanager
async def _started_seeing(
    folder: Path, workers: Mapping[str, str]
) -> AsyncIterator[tuple[ChaosCluster, Monitor]]:
    cluster = ChaosCluster(
        folder,
        step_s=None,
        model=write_seeing_model(folder),
        worker_options={**workers, "dtype": "float32", "kv-cache-bytes": str(SEEING_KV_BYTES)},
        services=(*SERVICES, *ENCODERS),
    )
    async with _monitored(cluster) as monitor:
        yield cluster, monitor


@contextlib.asynccontextmanager
async def _monitored(cluster: ChaosCluster) -> AsyncIterator[Monitor]:
    monitor = Monitor()
    try:
        await cluster.start()
        await monitor.start(cluster)
        yield monitor
        await monitor.stop()
    finally:
        cluster.stop()
