"""A worker process with a model that is parked, woken and resized by messages over NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.engine.executors.loading.model_loading import resolve_dtype
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import BlocksCleared, BlocksRemoved, BlocksStored
from shared.transport.bus import NatsBus
from tests.support.cluster.process_template import ForkedProcess
from tests.support.servers import NatsServer
from tests.support.services.parked_worker import WorkerClient, cpu_s, memory_bytes, worker_process

DTYPE = resolve_dtype("auto", torch.device("cpu"))
ITEM_BYTES = getattr(torch, DTYPE).itemsize
MIB = (1 << 20) * ITEM_BYTES // 2  # as many tokens in FP32
START, CEILING = 32 * MIB, 64 * MIB
PROMPTS = [[10 + (7 * index + 13 * each) % 1000 for index in range(900)] for each in range(6)]
KV_BYTES_PER_TOKEN = 6 * 2 * 4 * 32 * ITEM_BYTES
BLOCK_BYTES = 16 * KV_BYTES_PER_TOKEN
OPTIONS = ("--kv-cache-bytes", str(START), "--kv-ceiling-bytes", str(CEILING))
CONTEXT = ("--kv-floor-bytes", str(8 * MIB), "--max-context-tokens", "2048")


@pytest.fixture(scope="module")
def process(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkedProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with worker_process(folder, nats_server, DEMO_MODEL_DIR, *OPTIONS, *CONTEXT) as process:
        yield process


@pytest.fixture
async def index(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_server.url("kv_index-1"), process_id="kv_index-1")
    yield bus
    await bus.close()


@pytest.fixture
async def worker(
    nats_server: NatsServer, process: ForkedProcess, index: NatsBus
) -> AsyncIterator[WorkerClient]:
    """Ready, with the cache of its start, which may hold blocks."""
    client = await WorkerClient.connect(nats_server, index=index)
    await client.until_state("ready", "standby")
    await client.wake(START)
    await client.resize(START)
    await client.until_state("ready")
    yield client
    await client.close()


async def test_parked_worker_gives_the_memory_of_its_cache_back(
    worker: WorkerClient, process: ForkedProcess
) -> None:
    for prompt in PROMPTS:  # what the first requests allocate stays: 8 MiB, then under 2
        await worker.complete(prompt, max_tokens=2)
    await worker.park()
    parked = memory_bytes(process.pid, "Rss")
    await worker.wake(START)
    for prompt in PROMPTS:
        await worker.complete(prompt, max_tokens=2)
    touched = sum(map(len, PROMPTS)) * KV_BYTES_PER_TOKEN
    hot = memory_bytes(process.pid, "Rss")
    await worker.park()
    assert hot - memory_bytes(process.pid, "Rss") > 0.9 * touched
    assert memory_bytes(process.pid, "Rss") - parked < 4 * MIB
    heartbeat = await worker.until_state("standby")
    assert heartbeat.load is not None
    assert (heartbeat.load.num_total_blocks, heartbeat.load.num_free_blocks) == (0, 0)


async def test_tokens_are_the_same_before_and_after_and_the_prefix_cache_is_empty(
    worker: WorkerClient,
) -> None:
    prompt = PROMPTS[0][:100]
    before = await worker.complete(prompt)
    placement_id = await worker.place(prompt, 16)
    assert await worker.finished(placement_id) == before
    assert worker.num_cached_tokens(placement_id) == 96
    await worker.park()
    await worker.wake(START)
    placement_id = await worker.place(prompt, 16)
    assert await worker.finished(placement_id) == before
    assert worker.num_cached_tokens(placement_id) == 0


async def test_index_is_told_that_a_parked_cache_is_empty(worker: WorkerClient) -> None:
    await worker.complete(PROMPTS[1][:40])
    await worker.park()
    await worker.until(
        lambda: bool(worker.events) and worker.events[-1].events[-1] == BlocksCleared()
    )
    assert any(isinstance(each, BlocksStored) for each in worker.events[0].events)


async def test_park_and_wake_are_idempotent(worker: WorkerClient) -> None:
    await worker.park()
    await worker.park()
    await worker.wake(START)
    await worker.wake(CEILING)
    heartbeat = await worker.until_state("ready")
    assert heartbeat.load is not None
    assert heartbeat.load.num_total_blocks == START // BLOCK_BYTES


async def test_wake_takes_at_most_a_tenth_of_a_second(worker: WorkerClient) -> None:
    times = []
    for _ in range(3):
        await worker.park()
        await worker.until_state("standby")
        began_at = time.monotonic()
        await worker.wake(CEILING)
        times.append(time.monotonic() - began_at)
    assert min(times) <= 0.1


async def test_parking_waits_for_a_stream_and_refuses_other_requests(
    worker: WorkerClient,
) -> None:
    prompt = PROMPTS[2][:64]
    expected = await worker.complete(prompt, 80)
    placement_id = await worker.place(prompt, 80)
    parking = asyncio.create_task(worker.park())
    await worker.until_state("draining")
    with pytest.raises(WorkerBusy, match="worker-1 is draining"):
        await worker.place(PROMPTS[3][:64], 1)
    await parking
    assert await worker.finished(placement_id) == expected
    with pytest.raises(WorkerBusy, match="worker-1 is standby"):
        await worker.place(PROMPTS[3][:64], 1)


async def test_stream_that_outlasts_the_drain_is_not_harmed(worker: WorkerClient) -> None:
    prompt = PROMPTS[2][:64]
    expected = await worker.complete(prompt, 120)
    placement_id = await worker.place(prompt, 120)
    with pytest.raises(WorkerBusy, match=r"still has 1 requests after 0\.05 s"):
        await worker.park(drain_s=0.05)
    await worker.until_state("ready")
    assert len(worker.tokens_of(placement_id)) < 120
    assert (await worker.complete(PROMPTS[3][:64], 1)) is not None
    assert await worker.finished(placement_id) == expected


@pytest.mark.long
async def test_cache_shrinks_and_grows_while_sequences_hold_its_blocks(
    worker: WorkerClient, process: ForkedProcess
) -> None:
    expected = await asyncio.gather(*(worker.complete(each, 120) for each in PROMPTS))
    await worker.park()
    await worker.wake(CEILING)
    placements = [await worker.place(prompt, 120) for prompt in PROMPTS]
    await worker.until(lambda: all(map(worker.tokens_of, placements)))
    # They hold more, until they are preempted, which may be before the worker replies.
    assert await worker.resize(8 * MIB) >= 8 * MIB // BLOCK_BYTES * BLOCK_BYTES
    assert await worker.resize(16 * MIB) >= 16 * MIB // BLOCK_BYTES * BLOCK_BYTES
    assert [await worker.finished(each) for each in placements] == expected
    hot = memory_bytes(process.pid, "Rss")
    assert await worker.resize(8 * MIB) == 8 * MIB // BLOCK_BYTES * BLOCK_BYTES
    assert hot - memory_bytes(process.pid, "Rss") > 4 * MIB
    await worker.until(
        lambda: any(isinstance(e, BlocksRemoved) for each in worker.events for e in each.events)
    )
    assert worker.heartbeat is not None
    assert worker.heartbeat.model is not None
    assert worker.heartbeat.model.max_context_tokens == 2048


@pytest.mark.parametrize(
    ("kv_bytes", "words"),
    [
        (0, "kv_bytes 0: park a worker that needs no KV cache"),
        (4 * MIB, "holds no sequence of 2048 tokens, which needs 128"),
        (
            2 * CEILING,
            f"is more than this worker's ceiling of {CEILING // BLOCK_BYTES * BLOCK_BYTES}",
        ),
    ],
)
async def test_size_that_cannot_serve_is_refused_in_one_line(
    worker: WorkerClient, kv_bytes: int, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await worker.resize(kv_bytes)
    await worker.park()
    with pytest.raises(InvalidRequest, match="is standby: it has no KV cache"):
        await worker.resize(START)
    with pytest.raises(InvalidRequest, match=r"kv_bytes 0|" + words):
        await worker.wake(kv_bytes)
    assert (await worker.until_state("standby")).state == "standby"


async def test_parked_worker_leaves_its_core_to_others(
    worker: WorkerClient, process: ForkedProcess
) -> None:
    await worker.park()
    await worker.until_state("standby")
    first, before = worker.heartbeat, cpu_s(process.pid)
    assert first is not None and first.load is not None
    step, began_at = first.load.step, time.monotonic()
    await worker.until(lambda: _step(worker) >= step + 3)
    assert cpu_s(process.pid) - before <= 0.03 * (time.monotonic() - began_at)


def _step(worker: WorkerClient) -> int:
    assert worker.heartbeat is not None and worker.heartbeat.load is not None
    return worker.heartbeat.load.step


async def test_worker_that_starts_parked_wakes_and_ends_parked(
    nats_server: NatsServer, worker: WorkerClient, tmp_path: Path
) -> None:
    """SIGTERM ends it in standby, with status 0."""
    expected = await worker.complete(PROMPTS[4][:80])
    options = (*OPTIONS, *CONTEXT, "--parked")
    place = tmp_path, nats_server, DEMO_MODEL_DIR
    with worker_process(*place, *options, process_id="worker-2") as process:
        client = await WorkerClient.connect(nats_server, "worker-2", beside=worker)
        try:
            await client.until_state("standby")
            assert client.states in (["standby"], ["starting", "standby"])
            before = memory_bytes(process.pid, "Rss")
            await client.wake(START)
            assert await client.complete(PROMPTS[4][:80]) == expected
            await client.park()
            assert memory_bytes(process.pid, "Rss") - before < 16 * MIB
        finally:
            await client.close()
