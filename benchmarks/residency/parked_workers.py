"""The memory of parked workers of one host, and what a hot one gets of it.

    python -m benchmarks.residency.parked_workers [--model DIR] [--workers 8] [--alone]

Real worker processes of one model and a real nats-server; the commands are the messages of a host.
The workers are forked from a template, as a host does, and the template's memory counts, too. With
`--alone` each is started by itself and shares no imports.
Each worker fills its KV cache with prompts and is parked; then the first one is woken, and gets the
KV of all others by ResizeKv. Memory is proportional (PSS: a page shared by n processes counts 1/n
in each), so that the sum counts the shared weights once. The default model is a random Llama of
125 M parameters in BF16.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoints import LLAMA_125M, write_random_llama, write_tokenizer
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from services.host.workers.workers import WorkerProcesses
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from tests.support.servers import NatsServer
from tests.support.services.parked_worker import (
    WorkerClient,
    cpu_s,
    mapped_pss_bytes,
    memory_bytes,
    worker_process,
)

MIB = 1 << 20
KV_BYTES, PROMPT_TOKENS = 32 * MIB, 1000
OWN_BYTES = 250_000_000  # memory of a parked worker besides the weights
IDLE_S = 10.0
MAX_WAKE_S, MAX_IDLE_SHARE = 0.1, 0.01
CONTEXT_TOKENS = 2048


class Worker:
    def __init__(self, pid: int, client: WorkerClient) -> None:
        self.pid = pid
        self.client = client
        self.row: Row = {"worker": client.worker_id}

    @property
    def pss_bytes(self) -> int:
        return memory_bytes(self.pid, "Pss")

    @property
    def num_blocks(self) -> int:
        heartbeat = self.client.heartbeat
        assert heartbeat is not None and heartbeat.load is not None
        return heartbeat.load.num_total_blocks

    @property
    def block_bytes(self) -> int:
        heartbeat = self.client.heartbeat
        assert heartbeat is not None and heartbeat.model is not None
        return heartbeat.model.block_size * heartbeat.model.kv_bytes_per_token

    async def fill(self, seed: int) -> None:
        """Computes prompts for more blocks than the cache has."""
        num_prompts = KV_BYTES // (self.block_bytes // 16 * PROMPT_TOKENS) + 1
        for index in range(num_prompts):
            first = 100 + 1000 * index + seed
            await self.client.complete([first + i % 997 for i in range(PROMPT_TOKENS)], 2)

    async def until_blocks(self, is_reached: Callable[[int], bool]) -> int:
        await self.client.until(lambda: is_reached(self.num_blocks))
        return self.num_blocks


async def timed(work: Awaitable[object]) -> float:
    """Returns the milliseconds that the work takes."""
    began_at = time.monotonic()
    await work
    return (time.monotonic() - began_at) * 1e3


async def measure(workers: list[Worker], template: int | None) -> tuple[list[Row], list[Bar]]:
    """Measures workers that were forked from the process `template`, if there is one."""
    for index, worker in enumerate(workers):
        await worker.client.until_state("ready")
        await worker.fill(index)
    for worker in workers:
        worker.row["hot_pss_mb"] = worker.pss_bytes / 1e6
    for worker in workers:
        worker.row["park_ms"] = await timed(worker.client.park())
        worker.row["wake_ms"] = await timed(worker.client.wake(KV_BYTES))
        await worker.client.park()
    used_s = [cpu_s(worker.pid) for worker in workers]
    await asyncio.sleep(IDLE_S)
    for worker, before in zip(workers, used_s, strict=True):
        worker.row["idle_cpu_share"] = (cpu_s(worker.pid) - before) / IDLE_S
        worker.row["parked_pss_mb"] = worker.pss_bytes / 1e6
        worker.row["weights_pss_mb"] = mapped_pss_bytes(worker.pid, ".packed") / 1e6
    shared: list[Row] = []
    if template is not None:
        shared = [{"worker": "template", "parked_pss_mb": memory_bytes(template, "Pss") / 1e6}]
    grown = await grow(workers)
    rows = [*(worker.row for worker in workers), *shared, grown]
    return rows, bars_of(workers, shared, grown)


async def grow(workers: list[Worker]) -> Row:
    """Resizes caches: the first worker gets the KV of all."""
    first = workers[0]
    await first.client.wake(KV_BYTES)
    before = await first.until_blocks(lambda count: count > 0)
    given = await first.client.resize(KV_BYTES * len(workers))
    after = await first.until_blocks(lambda count: count > before)
    await first.fill(7)
    return {
        "worker": "the first, with the KV of all",
        "blocks": before,
        "grown_blocks": after,
        "freed_blocks": KV_BYTES * (len(workers) - 1) // first.block_bytes,
        "kv_mb": given / 1e6,
    }


def bars_of(workers: list[Worker], shared: list[Row], grown: Row) -> list[Bar]:
    rows = [worker.row for worker in workers]
    parked, weights, hot = (
        sum(row[name] for row in rows) for name in ("parked_pss_mb", "weights_pss_mb", "hot_pss_mb")
    )
    allowed = weights + OWN_BYTES / 1e6 * len(rows)
    returned = (hot - parked) / (KV_BYTES / 1e6 * len(rows))
    in_all = parked + sum(row["parked_pss_mb"] for row in shared)
    return [
        at_most("sum of PSS of parked workers", in_all, round(allowed, 1), "MB"),
        at_least("memory that parking returns", returned, 0.95, "of the filled KV"),
        at_least(
            "growth of the hot worker",
            grown["grown_blocks"] - grown["blocks"],
            grown["freed_blocks"],
            "blocks",
        ),
        at_most("longest wake", max(r["wake_ms"] for r in rows) / 1e3, MAX_WAKE_S, "s"),
        at_most(
            "CPU of a parked worker",
            max(row["idle_cpu_share"] for row in rows),
            MAX_IDLE_SHARE,
            "of a core",
        ),
    ]


async def start_alone(
    stack: AsyncExitStack, nats: NatsServer, model_dir: Path, names: list[str]
) -> AsyncIterator[int]:
    """Yields the pid of each worker as it starts."""
    options: tuple[str, ...] = (
        "--kv-cache-bytes",
        str(KV_BYTES),
        "--max-context-tokens",
        str(CONTEXT_TOKENS),
    )
    options += ("--kv-ceiling-bytes", str(KV_BYTES * len(names)), "--num-threads", "1")
    for name in names:
        process = stack.enter_context(worker_process(nats, model_dir, *options, process_id=name))
        yield process.pid


async def start_forked(
    host: WorkerProcesses, nats: NatsServer, model_dir: Path, names: list[str]
) -> AsyncIterator[int]:
    """Starts workers that are forked like those of a host."""
    for name in names:
        config = WorkerConfig(
            nats_url=nats.url(name),
            process_id=name,
            model_dir=model_dir,
            model_name=model_dir.name,
            device="cpu",
            num_threads=1,
            kv_cache_bytes=KV_BYTES,
            kv_ceiling_bytes=KV_BYTES * len(names),
            max_context_tokens=CONTEXT_TOKENS,
        )
        yield (await host.launch(config, log_name=model_dir.name)).pid


async def run(
    model_dir: Path, num_workers: int, folder: Path, *, is_alone: bool
) -> tuple[list[Row], list[Bar]]:
    names = [f"worker-{index + 1}" for index in range(num_workers)]
    users = [("gateway", "gateway-1"), ("scheduler", "scheduler-1")]
    nats = NatsServer(folder, [*users, *(("worker", name) for name in names)])  # type: ignore[list-item]
    workers: list[Worker] = []
    template: int | None = None
    async with AsyncExitStack() as stack:
        stack.callback(nats.stop)
        if is_alone:
            pids = start_alone(stack, nats, model_dir, names)
        else:
            host = WorkerProcesses(
                folder, os.environ, MonotonicClock(), num_threads=1, on_end=_report_end
            )
            stack.push_async_callback(host.stop)
            await host.start(has_template=True)
            while host._template is None:  # noqa: ASYNC110 - else the first worker is not forked
                await asyncio.sleep(0.01)
            pids = start_forked(host, nats, model_dir, names)
        async for pid in pids:
            beside = workers[0].client if workers else None
            client = await WorkerClient.connect(nats, names[len(workers)], beside=beside)
            stack.push_async_callback(client.close)
            workers.append(Worker(pid, client))
            await client.until_state("ready")
        if not is_alone:
            template = _parent(workers[0].pid)
        return await measure(workers, template)


def _report_end(worker: object, status: int, reason: str) -> None:
    print(f"a worker has ended: {reason}", file=sys.stderr)


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--name", default="parked_workers", help="name of the result's file")
    parser.add_argument("--alone", action="store_true", help="workers without a template")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="hearth-parked-") as name:
        folder, model_dir = Path(name), given.model
        if model_dir is None:
            model_dir = folder / "llama-125m"
            write_random_llama(model_dir, LLAMA_125M, dtype="bfloat16")
            write_tokenizer(model_dir, LLAMA_125M["vocab_size"])
        rows, bars = asyncio.run(run(model_dir, given.workers, folder, is_alone=given.alone))
    command = ["-m", "benchmarks.residency.parked_workers", *sys.argv[1:]]
    write_result(given.name, rows, bars, command)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
