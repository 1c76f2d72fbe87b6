"""The cost of the prefix index: memory of a million blocks, lookups and events per CPU second.

    python -m benchmarks.kv_index [--blocks 1000000] [--seconds 5] [--workers 16]

All rates are per CPU second of the working process, so that the figures are valid on a busy machine
and on one core. Pure: from a message's packed bytes to the reply, or into index and records. Over
NATS: a kv_index process with real servers, queried by this process; its CPU time covers the
connection, decoding, the reply and its share of heartbeats.

    memory    the growth of a new process as it stores the blocks, with the records of prefixes
    lookups   64 blocks: one worker in eight has all of them, the others half
    events    runs of 32 blocks in messages of 20 runs, stored and later removed
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from hashlib import blake2b
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.report import Bar, Row, at_least, at_most, write_result
from services.kv_index.index import Outcome, PrefixIndex
from services.kv_index.registry import PrefixRegistry
from services.kv_index.service import build_kv_index
from shared import subjects
from shared.clock import MonotonicClock
from shared.config import KvIndexConfig
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import (
    BlockPage,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    ListBlocks,
    MatchPrefix,
    PrefixMatches,
    StoreLoad,
    WorkerLoad,
)
from shared.packing import BLOCK_HASH_BYTES, unpack_hashes
from shared.randomness import SystemRandomness
from shared.store import Command
from shared.transport.bus import NatsBus
from tests.support.records import model_card
from tests.support.servers import NatsServer, RedisServer

RUN_BLOCKS = 32
RUNS_PER_MESSAGE = 20
LOOKUP_BLOCKS = 64
NUM_TENANTS = 50
ASKERS = 64  # concurrent requests over NATS
MODEL = ("m", "r1", "bfloat16/b16")
CARD = model_card(
    name=MODEL[0],
    revision=MODEL[1],
    kv_format=MODEL[2],
    max_context_tokens=131_072,
    vocab_size=128_256,
)
MIB = 1 << 20


class NoStore:
    """Discards writes: Redis' own time is not the index's."""

    async def get(self, key: str) -> bytes | None:
        return None

    async def hash_get(self, key: str) -> dict[bytes, bytes]:
        return {}

    async def sorted_set_head(self, key: str, count: int) -> list[bytes]:
        return []

    async def sorted_set_size(self, key: str) -> int:
        return 0

    async def write(self, commands: Any) -> None:
        for command in commands:
            _check(command)

    def load(self) -> StoreLoad:
        return StoreLoad()

    async def close(self) -> None:
        pass


def _check(command: Command) -> None:
    assert command[0]


# ── data ─────────────────────────────────────────────────────────────────────────────────────────


def block_hash(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=BLOCK_HASH_BYTES).digest()


def packed(first: int, count: int) -> bytes:
    return b"".join(block_hash(number) for number in range(first, first + count))


def run_of(first: int, count: int = RUN_BLOCKS) -> BlocksStored:
    return BlocksStored(
        tenant_id=f"tenant-{first // RUN_BLOCKS % NUM_TENANTS}",
        parent_hash=block_hash(first - 1) if first else bytes(BLOCK_HASH_BYTES),
        first_block_index=0,
        block_hashes=packed(first, count),
    )


def message(worker_id: str, number: int, events: tuple[Any, ...]) -> KvEvents:
    return KvEvents(
        worker_id=worker_id,
        epoch=1,
        sequence_number=number,
        model=MODEL[0],
        revision=MODEL[1],
        kv_format=MODEL[2],
        events=events,
    )


def page(worker_id: str, stored: tuple[BlocksStored, ...] = ()) -> BlockPage:
    return BlockPage(
        worker_id=worker_id,
        epoch=1,
        sequence_number=0,
        model=MODEL[0],
        revision=MODEL[1],
        kv_format=MODEL[2],
        stored=stored,
    )


class Table:
    """Index and records as the service has them, without bus and loops."""

    def __init__(self, num_workers: int) -> None:
        self.index = PrefixIndex()
        self.registry = PrefixRegistry(NoStore(), time.time, max_per_tenant=1000, ttl_s=86_400)
        self.worker_ids = [f"worker-{number}" for number in range(num_workers)]
        for worker_id in self.worker_ids:
            self.index.add_worker(worker_id, *MODEL)
            self.index.begin_resync(worker_id)
            self.index.add_page(page(worker_id))
            self.index.finish_resync(worker_id)

    def take(self, events: KvEvents) -> None:
        assert self.index.apply(events) is Outcome.APPLIED
        for event in events.events:
            if isinstance(event, BlocksStored):
                num_tokens = len(event.block_hashes) // BLOCK_HASH_BYTES * CARD.block_size
                self.registry.stored(
                    events.worker_id,
                    tenant_id=event.tenant_id,
                    model=MODEL[0],
                    revision=MODEL[1],
                    num_tokens=num_tokens,
                    num_bytes=0,
                    parent_hash=event.parent_hash,
                    tip_hash=event.block_hashes[-BLOCK_HASH_BYTES:],
                )
            elif isinstance(event, BlocksRemoved):
                self.registry.removed(events.worker_id, event.block_hashes)

    def match(self, question: MatchPrefix) -> PrefixMatches:
        block_hashes = unpack_hashes(question.block_hashes)
        reply = self.index.match(block_hashes, question.model, question.revision)
        deepest = max(match.num_blocks for match in reply.matches)
        self.registry.matched(question.tenant_id, block_hashes, deepest)
        return reply


def stored_messages(worker_ids: list[str], num_blocks: int) -> Iterator[KvEvents]:
    """Messages of the workers in turn; each block is reported once."""
    numbers = dict.fromkeys(worker_ids, 0)
    per_message = RUN_BLOCKS * RUNS_PER_MESSAGE
    for worker_id, first in zip(cycle(worker_ids), range(0, num_blocks, per_message), strict=False):
        numbers[worker_id] += 1
        last = min(first + per_message, num_blocks)
        runs = tuple(
            run_of(start, min(RUN_BLOCKS, last - start)) for start in range(first, last, RUN_BLOCKS)
        )
        yield message(worker_id, numbers[worker_id], runs)


def question(number: int) -> MatchPrefix:
    first = number * LOOKUP_BLOCKS
    return MatchPrefix(
        tenant_id=f"tenant-{first // RUN_BLOCKS % NUM_TENANTS}",
        model=MODEL[0],
        revision=MODEL[1],
        block_hashes=packed(first, LOOKUP_BLOCKS),
    )


# ── pure ─────────────────────────────────────────────────────────────────────────────────────────


def memory_mib(num_blocks: int, num_workers: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_fill, args=(theirs, num_blocks, num_workers))
    child.start()
    grown = float(ours.recv())
    child.join()
    return grown


def _fill(pipe: Connection, num_blocks: int, num_workers: int) -> None:
    table = Table(num_workers)
    table.take(message(table.worker_ids[0], 1, (run_of(1 << 40),)))
    before = _peak_mib()
    messages = stored_messages(table.worker_ids[1:], num_blocks)
    for events in messages:
        table.take(msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=KvEvents))
    assert table.index.num_blocks >= num_blocks
    pipe.send(_peak_mib() - before)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def lookups_per_s(num_blocks: int, num_workers: int, seconds: float) -> float:
    table = Table(num_workers)
    for worker_number, worker_id in enumerate(table.worker_ids):
        for number in range(num_blocks // LOOKUP_BLOCKS):
            share = LOOKUP_BLOCKS if worker_number % 8 == 0 else LOOKUP_BLOCKS // 2
            run = run_of(number * LOOKUP_BLOCKS, share)
            table.take(message(worker_id, number + 1, (run,)))
    questions = cycle([question(number) for number in range(num_blocks // LOOKUP_BLOCKS)])
    return per_cpu_s(lambda: table.match(next(questions)), seconds)


def per_cpu_s(call: Callable[[], object], seconds: float, batch: int = 200) -> float:
    num_calls, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
        for _ in range(batch):
            call()
        num_calls += batch
    return num_calls / spent


def events_per_s(num_blocks: int, num_workers: int) -> float:
    """Returns the rate of blocks stored and then removed again, including decoding."""
    table = Table(num_workers)
    stored = list(stored_messages(table.worker_ids, num_blocks))
    encoded = [msgspec.msgpack.encode(each) for each in (*stored, *removals_of(stored))]
    decoder = msgspec.msgpack.Decoder(KvEvents)
    began = time.process_time()
    for data in encoded:
        table.take(decoder.decode(data))
    spent = time.process_time() - began
    assert table.index.num_blocks == 0
    return 2 * num_blocks / spent


def removals_of(stored: list[KvEvents]) -> Iterator[KvEvents]:
    """Returns the removals of the same blocks, in the messages that follow."""
    numbers = {each.worker_id: each.sequence_number for each in stored}
    for each in stored:
        numbers[each.worker_id] += 1
        hashes = [run.block_hashes for run in each.events if isinstance(run, BlocksStored)]
        removed = tuple(BlocksRemoved(block_hashes=packed_run) for packed_run in hashes)
        yield message(each.worker_id, numbers[each.worker_id], removed)


# ── over NATS ────────────────────────────────────────────────────────────────────────────────────


def serve_index(pipe: Connection) -> None:
    async def serve() -> None:
        config = msgspec.msgpack.decode(pipe.recv_bytes(), type=KvIndexConfig)
        service = await build_kv_index(config)
        await service.start()
        pipe.send(None)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await service.stop()

    uvloop.run(serve())


class Peer:
    """A worker with an empty cache, for which the benchmark creates events."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.num_events = 0
        self.is_listed = asyncio.Event()
        self.health_monitor = HealthMonitor(
            bus,
            MonotonicClock(),
            SystemRandomness(),
            roles=("prefill",),
            model=CARD,
            loads=Loads(
                worker=lambda: WorkerLoad(step=0, step_budget_s=60.0, num_kv_events=self.num_events)
            ),
        )
        self.health_monitor.epoch = 1

    async def join(self) -> None:
        subject = subjects.list_blocks("prefill", self._bus.process_id)
        await self._bus.serve(subject, ListBlocks, self._page)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    def _page(self, _: ListBlocks) -> BlockPage:
        self.is_listed.set()
        return page(self._bus.process_id)

    async def tell(self, events: KvEvents) -> None:
        self.num_events = events.sequence_number
        await self._bus.publish(subjects.kv_events("prefill", self._bus.process_id), events)


async def over_nats(num_blocks: int, seconds: float) -> tuple[float, float]:
    """Returns (lookups, blocks in events) per CPU second of the index process."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats, redis = NatsServer(folder), RedisServer()
        stack.callback(nats.stop)
        stack.callback(redis.stop)
        pid = _start_index(stack, nats, redis)
        worker = await NatsBus.connect(nats.url("prefill-1"), process_id="prefill-1")
        stack.push_async_callback(worker.close)
        asker = await NatsBus.connect(nats.url("scheduler-1"), process_id="scheduler-1")
        stack.push_async_callback(asker.close)
        peer = Peer(worker)
        await peer.join()
        stack.push_async_callback(peer.health_monitor.stop)
        events = await _tell(peer, asker, pid, num_blocks)
        return await _ask(asker, pid, num_blocks, seconds), events


def _start_index(stack: AsyncExitStack, nats: NatsServer, redis: RedisServer) -> int:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_index, args=(theirs,), daemon=True)
    child.start()
    config = KvIndexConfig(
        nats_url=nats.url("kv_index-1"), process_id="kv_index-1", redis_url=redis.url
    )
    ours.send_bytes(msgspec.msgpack.encode(config))
    ours.recv()
    stack.callback(child.join, 10)
    stack.callback(ours.send, None)
    assert child.pid is not None
    return child.pid


async def _tell(peer: Peer, asker: NatsBus, pid: int, num_blocks: int) -> float:
    """Publishes events and waits until the index has the last block."""
    messages = list(stored_messages(["prefill-1"], num_blocks))
    await asyncio.wait_for(peer.is_listed.wait(), 10)
    await asyncio.sleep(0.5)
    began = cpu_s(pid)
    for each in messages:
        await peer.tell(each)
        await asyncio.sleep(0)
    num_told = num_blocks - (num_blocks - 1) % RUN_BLOCKS
    last = msgspec.structs.replace(question(0), block_hashes=packed(num_told - 1, 1))
    while not (await lookup(asker, last)).matches:
        await MonotonicClock().sleep(0.01)
    return num_blocks / (cpu_s(pid) - began)


async def _ask(asker: NatsBus, pid: int, num_blocks: int, seconds: float) -> float:
    questions = cycle([question(number) for number in range(num_blocks // LOOKUP_BLOCKS)])
    num_asked, until = 0, time.monotonic() + seconds

    async def ask() -> None:
        nonlocal num_asked
        while time.monotonic() < until:
            assert (await lookup(asker, next(questions))).matches
            num_asked += 1

    began = cpu_s(pid)
    await asyncio.gather(*(ask() for _ in range(ASKERS)))
    return num_asked / (cpu_s(pid) - began)


async def lookup(asker: NatsBus, asked: MatchPrefix) -> PrefixMatches:
    return await asker.request(subjects.MATCH, asked, PrefixMatches, timeout_s=10.0)


def cpu_s(pid: int) -> float:
    """Returns a process's CPU time so far, all threads; the scheduler counts it in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


# ─────────────────────────────────────────────────────────────────────────────────────────────────


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="number of blocks")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the lookups")
    parser.add_argument("--workers", type=int, default=16)
    given = parser.parse_args(argv)
    num_lookup_blocks = min(given.blocks, 100_000)
    memory = memory_mib(given.blocks, given.workers)
    lookups = lookups_per_s(num_lookup_blocks, given.workers, given.seconds)
    events = events_per_s(num_lookup_blocks, given.workers)
    nats_lookups, nats_events = uvloop.run(over_nats(num_lookup_blocks, given.seconds))
    megabytes = memory * MIB / 1e6
    scale = 1_000_000 / given.blocks
    rows: list[Row] = [
        {"case": f"{given.blocks} blocks, MB", "value": megabytes},
        {"case": "64-block lookups, pure, 1/CPU s", "value": lookups},
        {"case": "64-block lookups, NATS, 1/CPU s", "value": nats_lookups},
        {"case": "blocks in events, pure, 1/CPU s", "value": events},
        {"case": "blocks in events, NATS, 1/CPU s", "value": nats_events},
    ]
    bars: list[Bar] = [
        at_most("memory of a million blocks", megabytes * scale, 400, "MB"),
        at_least("64-block lookups as a pure object", lookups, 20_000, "/s"),
        at_least("64-block lookups over NATS on one core", nats_lookups, 5_000, "/s"),
        at_least("blocks in events as a pure object", events, 100_000, "/s"),
        at_least("blocks in events over NATS on one core", nats_events, 100_000, "/s"),
    ]
    write_result("kv_index", rows, bars, ["-m", "benchmarks.kv_index", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
