"""Tenants with the same prompts on a few workers; `origins` detects leaks between them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.request.generation_request import (
    GenerationRequest,
    RequestContext,
    build_request,
)
from services.gateway.request.prompt import TokenPrompt
from services.gateway.request.sampling import SamplingFields
from shared import subjects
from shared.errors import HearthError
from shared.messages import (
    KvEvents,
    MatchPrefix,
    PrefixMatches,
    Request,
    SamplingParams,
)
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TenantRecord
from tests.simulation.checks.origins import MarkedExecutor, Origins
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.kv_link import DataPlane
from tests.support.world.services import SimulatedIndex
from tests.support.world.store import MemoryStore
from tests.support.world.workers import BLOCK_SIZE, Peer, Received, SimulatedWorker

NUM_BLOCKS = 26  # of each worker: the tenants' prompts do not fit together


class Isolation:
    """Three workers, an index, Redis, and a peer that sends requests for any tenant."""

    def __init__(self) -> None:
        self.origins = Origins()
        self.network = SimulatedNetwork()
        self.store = MemoryStore()
        self.peer = Peer(self.network)
        self.index = SimulatedIndex(self.network, self.store, "kv_index-1", seed=3)
        self.num_requested: dict[str, int] = defaultdict(int)
        self.open: list[tuple[str, bytes, Request, int]] = []
        self._scheduler_bus = self.network.bus("scheduler-1")
        self._observer_bus = self.network.bus("observer-1")
        plane = DataPlane()
        self.workers = {
            "decode-1": self._worker(plane, "decode-1", ("decode",), zeroes_freed_blocks=True),
            "worker-1": self._worker(plane, "worker-1", ("prefill", "decode")),
            "prefill-1": self._worker(plane, "prefill-1", ("prefill",), copy_s=0.002),
        }

    def _worker(
        self, plane: DataPlane, worker_id: str, roles: tuple[Any, ...], **options: Any
    ) -> SimulatedWorker:
        worker = SimulatedWorker(
            self.network,
            plane,
            worker_id,
            roles,
            num_blocks=NUM_BLOCKS,
            max_batch_tokens=48,
            executor_type=MarkedExecutor,
            **options,
        )
        assert isinstance(worker.executor, MarkedExecutor)
        worker.executor.engine, worker.executor.origins = worker.engine, self.origins
        worker.executor.worker_id = worker_id
        return worker

    async def start(self) -> None:
        await self._observer_bus.subscribe(subjects.KV_EVENTS, KvEvents, self.origins.take_events)
        for each in (self.peer, self.index, *self.workers.values()):
            await each.start()
        await asyncio.sleep(1.5)  # virtual: watchers become able to judge

    def request(
        self, tenant_id: str, cache_salt: str, tokens: list[int], **options: Any
    ) -> tuple[Request, int]:
        """A request as a gateway makes it from a body."""
        sampling = SamplingParams(seed=1, max_tokens=options.pop("max_tokens", 3), temperature=0.0)
        generation = GenerationRequest(
            model="timing",
            prompt=TokenPrompt(tokens, "prompt"),
            sampling=SamplingFields(),
            cache_salt=cache_salt,
            num_choices=options.pop("num_choices", 1),
        )
        tenant = TenantRecord(tenant_id=tenant_id)
        origin = RequestContext(
            request_id="r", tenant=tenant, gateway_id="gateway-1", timeout_s=60.0
        )
        card = self.workers["decode-1"].worker.served.card
        request = build_request(generation, tokens, sampling, card, origin, PublicPrefixes())
        if options:
            request = type(request)(**{**_fields(request), **options})
        return request, self.origins.declare(request, cache_salt)

    async def place(
        self, worker_id: str, request: Request, number: int, candidates: tuple[str, ...]
    ) -> bytes | None:
        """Returns None if the worker has no room."""
        try:
            placement_id = await self.peer.place(worker_id, request, candidates)
        except HearthError:
            return None
        self.open.append((worker_id, placement_id, request, number))
        return placement_id

    async def match(self, tenant_id: str, cache_salt: str, tokens: list[int]) -> int:
        """The most blocks that a worker has according to the index."""
        request, number = self.request(tenant_id, cache_salt, tokens)
        self.num_requested[tenant_id] += 1
        match_request = MatchPrefix(
            tenant_id=tenant_id,
            model=request.model,
            revision=request.revision,
            block_hashes=request.block_hashes,
        )
        reply = await self._scheduler_bus.request(
            subjects.MATCH, match_request, PrefixMatches, timeout_s=1.0
        )
        for each in reply.matches:
            hit = tokens[: each.num_blocks * BLOCK_SIZE]
            self.origins.check_hit("index", each.worker_id, number, hit)
        return max((each.num_blocks for each in reply.matches), default=0)

    async def finish(self, placement_id: bytes, request: Request) -> list[Received]:
        received = [
            await self.peer.finished(placement_id, each.choice_index) for each in request.choices
        ]
        await self.peer.acknowledge(self._worker_of(placement_id), placement_id)
        self.open = [each for each in self.open if each[1] != placement_id]
        return received

    async def abort(self, index: int) -> None:
        worker_id, placement_id, _, _ = self.open.pop(index)
        await self.peer.abort(worker_id, placement_id)

    def _worker_of(self, placement_id: bytes) -> str:
        return next(each[0] for each in self.open if each[1] == placement_id)

    async def settle(self) -> None:
        """Ends everything, and waits until the index and Redis are up to date."""
        for _, placement_id, request, _ in list(self.open):
            await self.finish(placement_id, request)
        self.network.is_dropped = None
        await asyncio.sleep(3.0)  # virtual: heartbeats reveal a gap, and a resync repairs it
        for worker in self.workers.values():
            assert worker.is_empty
        self.origins.check_registry(self.store, self.num_requested)

    async def stop(self) -> None:
        for each in (*self.workers.values(), self.index, self.peer):
            await each.stop()


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@asynccontextmanager
async def isolation():  # type: ignore[no-untyped-def]
    made = Isolation()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def drop_events(subject: str, sender: str, receiver: str) -> bool:
    return subject.endswith("kv_events") and receiver.startswith("kv_index")
