"""Requests of a tenant with zero retention, beside those of another one, in virtual time; then a
search of all that lies in Redis and in the memory of workers and index: only counts are left.

Workers have the real core, pools and data plane, and the timing engine, whose KV is a digest of all
tokens before it. What the other tenant leaves, and planted leaks, are found by the same search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from services.kv_index.service import KvIndexService
from shared.block_hash import extend_chain, root_hash
from shared.config import KvIndexConfig
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.errors import HearthError
from shared.messages import Role
from tests.simulation.checks.expected import states_of
from tests.support.canaries.canary import Canary
from tests.support.canaries.memory import data_of
from tests.support.canaries.search import CanarySearch, Pieces
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.kv_link import DataPlane
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore
from tests.support.world.workers import (
    BLOCK_SIZE,
    REVISION,
    CopyingExecutor,
    Peer,
    SimulatedWorker,
    request_of,
)

BURSTS = 24
QUIET, OTHER = "quiet", "other"
WORKERS: dict[str, Role] = {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode"}
DAY_LIMIT_S = 3_600.0  # for 576 s of a core
UNACKNOWLEDGED_S = 40.0  # after which a worker drops what no gateway has acknowledged


class ReusingExecutor(CopyingExecutor):
    """Takes what lies in a block when KV is first written to it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reused = Pieces()

    async def run(self, inputs: StepInputs) -> StepOutput:
        for row, num_context in enumerate(inputs.context_lens.tolist()):
            first = num_context - int(inputs.query_lens[row])
            self._take(inputs.block_tables[0, row].tolist(), first, num_context)
        return await super().run(inputs)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        self._take(list(run.block_table), run.first_token, run.first_token + run.num_tokens)
        await super().write_kv(run, payload)

    def _take(self, table: list[int], first: int, end: int) -> None:
        for block_id in table[-(-first // BLOCK_SIZE) : -(-end // BLOCK_SIZE)]:
            slots = slice(block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE)
            self.reused.add("a block that is used again", self._kv[slots].tobytes())


@dataclass
class Day:
    """The processes, and what each tenant's requests were."""

    seed: int
    network: SimulatedNetwork = field(default_factory=SimulatedNetwork)
    store: MemoryStore = field(default_factory=MemoryStore)
    canaries: list[Canary] = field(default_factory=list)

    async def start(self) -> None:
        plane = DataPlane()
        self.random, self.peer = Random(self.seed), Peer(self.network)
        config = KvIndexConfig(nats_url="nats://n", process_id="kv_index-1", redis_url="redis://r")
        self.index = KvIndexService(
            config,
            self.network.bus("kv_index-1"),
            self.store,
            VirtualClock(),
            SeededRandomness(1),
            wall_clock=lambda: 1_000.0,
        )
        self.workers = {
            name: SimulatedWorker(
                self.network,
                plane,
                name,
                (role,),
                num_blocks=40,
                copy_s=0.002,
                executor_type=ReusingExecutor,
            )
            for name, role in WORKERS.items()
        }
        await self.index.start()
        await self.peer.start()
        for worker in self.workers.values():
            await worker.start()
        await asyncio.sleep(2.5)

    async def use(self, num_requests: int, over_s: float) -> None:
        """A few requests come at once, so that blocks are short."""
        async with asyncio.TaskGroup() as group:
            for number in range(num_requests):
                burst = self.random.randrange(BURSTS) * over_s / BURSTS
                group.create_task(self._request(number, burst))
        await asyncio.sleep(UNACKNOWLEDGED_S)

    async def _request(self, number: int, at_s: float) -> None:
        random = Random(f"{self.seed} {number}")
        await asyncio.sleep(at_s + random.random() * 0.2)
        tenant_id = QUIET if number % 2 else OTHER
        # odd and even: KV is equal where all tokens before it are
        prompt = [
            2 * random.randrange(500, 16_000) + number % 2 for _ in range(random.randrange(20, 120))
        ]
        choices = {index: [] for index in range(random.choice((1, 1, 1, 3)))}
        request = request_of(
            prompt,
            tenant_id=tenant_id,
            max_tokens=random.choice((1, 8, 60)),
            outputs=choices,
            seed=number,
            temperature=float(len(choices) > 1),
        )
        request = msgspec.structs.replace(
            request, request_id=f"r{number}", is_zero_retention=tenant_id == QUIET
        )
        worker_id = random.choice(("decode-1", "decode-2"))
        candidates = ("prefill-1",) if random.random() < 0.6 else ()
        try:
            placement_id = await self.peer.place(worker_id, request, candidates)
        except HearthError:  # blocks are few on purpose
            return
        ending = random.choice(("finish", "finish", "leave", "silence"))
        if ending == "leave":
            await asyncio.sleep(random.random() * 0.3)
            await self.peer.abort(worker_id, placement_id)
        else:
            for index in choices:
                await self.peer.finished(placement_id, index)
        if ending == "finish":
            await self.peer.acknowledge(worker_id, placement_id)
        for index in choices:
            self._note(tenant_id, prompt + self.peer.of(placement_id, index).output)

    def _note(self, tenant_id: str, token_ids: list[int]) -> None:
        states = states_of(tuple(token_ids))
        halves = b"".join(each[:8] for each in states), b"".join(each[8:] for each in states)
        hashes = extend_chain(root_hash(tenant_id, REVISION), token_ids, BLOCK_SIZE)
        self.canaries.append(
            Canary(
                tenant_id=tenant_id,
                token_ids=(tuple(token_ids),),
                block_hashes=tuple(hashes),
                kv=(b"".join(states), *halves),
            )
        )

    def found(self, search: CanarySearch) -> set[tuple[str, str, str]]:
        """Returns tenants, forms and places of what lies anywhere."""
        sightings = set()
        roots = {name: [worker] for name, worker in self.workers.items()}
        roots |= {"kv_index-1": [self.index], "redis": [self.store.data]}
        for place, each in roots.items():
            pieces = Pieces()
            # messages under way, clients and other processes are not of this one
            others = [self, self.peer, self.network, self.store, *self.workers.values()]
            without = [it for it in others if it is not each[0]]
            for kind, data in data_of(each, without=without):
                pieces.add(f"{place}: {kind}", data)
            sightings |= {(s.tenant_id, s.form, str(note)) for note, s in pieces.take(search)}
        return sightings

    def reused(self, search: CanarySearch) -> set[str]:
        """Returns the tenants whose KV lay in a block that was used again."""
        executors = [each.executor for each in self.workers.values()]
        return {
            sighting.tenant_id
            for each in executors
            for _, sighting in each.reused.take(search)  # type: ignore[attr-defined]
        }

    async def stop(self) -> None:
        await self.peer.stop()
        for worker in self.workers.values():
            await worker.stop()
        await self.index.stop()


def plant_kv(day: Day, canary: Canary) -> None:
    states = np.frombuffer(canary.kv[0][:32], dtype=np.uint8).reshape(2, 16)
    day.workers["decode-2"].executor._kv[:2] = states


def plant_hash(day: Day, canary: Canary) -> None:
    day.store.data["hearth:quiet:prefixes"] = {canary.block_hashes[0].hex().encode(): 1.0}


def plant_tokens(day: Day, canary: Canary) -> None:
    day.index.leaked = {"prompt": list(canary.token_ids[0])}  # type: ignore[attr-defined]


PLANTED: dict[str, Callable[[Day, Canary], None]] = {
    "KV": plant_kv,
    "block hash, hexadecimal": plant_hash,
    "token ids, packed": plant_tokens,
}


def check_day(seed: int, num_requests: int, over_s: float) -> None:
    async def main() -> None:
        day = Day(seed)
        await day.start()
        await day.use(num_requests, over_s)
        search = CanarySearch(day.canaries)
        found = day.found(search)
        quiet = sorted(each for each in found if each[0] == QUIET)
        assert quiet == []
        assert {"KV", "block hash"} <= {form for _, form, _ in found}, "of the other tenant"
        assert day.reused(search) == {OTHER}
        assert all(each.is_empty for each in day.workers.values())
        canary = next(each for each in day.canaries if each.tenant_id == QUIET)
        for form, plant in PLANTED.items():
            plant(day, canary)
            planted = {each[1] for each in day.found(search) if each[0] == QUIET}
            assert form in planted, "the search does not find what was planted"
        await day.stop()

    run(main(), limit_s=over_s + 600.0)


def test_requests_of_a_minute_leave_only_counts() -> None:
    check_day(7, 120, 60.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "over_s"),
    [
        *((each, 600.0) for each in range(10)),
        (10, 3600.0),
        pytest.param(11, 86_400.0, marks=pytest.mark.timeout(DAY_LIMIT_S)),
    ],
)
def test_requests_of_a_day_leave_only_counts(seed: int, over_s: float) -> None:
    """A day's number, mostly in less: each quiet hour costs 100,000 heartbeats, and 24 s of a
    core.
    """
    check_day(seed, 2_400, over_s)
