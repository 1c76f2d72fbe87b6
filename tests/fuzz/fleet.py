"""All five services on the simulated network, and a check that nothing is left at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog.testing

from services.gateway.models.model_check import checked_files
from services.gateway.models.preparation_pools import PreparationPools
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import TokenPrompt
from services.gateway.request.request_output import RequestOutput
from services.gateway.request.sampling import SamplingFields
from services.gateway.service import GatewayService
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.text.model_files import ModelFiles
from services.kv_index.service import KvIndexService
from services.scheduler.service import SchedulerService
from shared.config import GatewayConfig, KvIndexConfig, SchedulerConfig
from shared.errors import HearthError
from shared.packing import pack_token_ids
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_admin import store_api_key
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock
from tests.support.world.kv_link import DataPlane
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore
from tests.support.world.workers import MODEL, SimulatedWorker

NATS, REDIS = "nats://here", "redis://here"
PROMPT = "the quick brown fox jumps over the lazy dog " * 6
WORKERS = ("prefill-1", "decode-1", "worker-1")
PINNED = PinnedPrefix(
    name="system-prompt",
    tenant_id="tenant-1",
    model=MODEL,
    messages=[],
    token_ids=pack_token_ids(range(100, 140)),
    created_at=0,
)
PROCESSES = (*WORKERS, "gateway-1", "scheduler-1", "kv_index-1")


class Fleet:
    def __init__(self, model_dir: Path, files: ModelFiles) -> None:
        self.network, self._prompt = SimulatedNetwork(), files.tokenizer.encode([PROMPT])
        clock, data_plane = VirtualClock(), DataPlane()
        self.index_store, self._gateway_store = MemoryStore(), MemoryStore()
        config = GatewayConfig(
            nats_url=NATS,
            process_id="gateway-1",
            redis_url=REDIS,
            model_dir=model_dir,
            model_name=MODEL,
            http_port=0,
            request_timeout_s=60.0,
        )
        self.gateway = GatewayService(
            config,
            self.network.bus("gateway-1"),
            GatewayStores.of_one(self._gateway_store),
            PreparationPools.of(config, checked_files(files, family_of(files))),
            clock=clock,
            randomness=SeededRandomness(1),
        )
        self.scheduler = SchedulerService(
            SchedulerConfig(nats_url=NATS, process_id="scheduler-1", max_local_prefill_tokens=4),
            self.network.bus("scheduler-1"),
            clock,
            SeededRandomness(2),
        )
        self.index = KvIndexService(
            KvIndexConfig(nats_url=NATS, process_id="kv_index-1", redis_url=REDIS),
            self.network.bus("kv_index-1"),
            self.index_store,
            clock,
            SeededRandomness(3),
            wall_clock=clock.now,
        )
        self.workers = [
            SimulatedWorker(self.network, data_plane, "prefill-1", ("prefill",)),
            SimulatedWorker(self.network, data_plane, "decode-1", ("decode",)),
            SimulatedWorker(self.network, data_plane, "worker-1", ("prefill", "decode")),
        ]
        self._services = [self.index, self.scheduler, *self.workers, self.gateway]

    async def start(self) -> None:
        await pinned_prefix.save(self.index_store, PINNED, 0.0)
        await store_api_key(self._gateway_store, "key", PINNED.tenant_id)
        for each in self._services:
            await each.start()
        await asyncio.sleep(2)  # virtual seconds, until heartbeats have arrived

    async def stop(self) -> None:
        for each in reversed(self._services):
            await each.stop()

    async def open(
        self,
        request_id: str,
        *,
        max_tokens: int,
        num_choices: int = 1,
        tenant_id: str = "tenant-1",
    ) -> RequestOutput:
        generation = GenerationRequest(
            model=MODEL,
            prompt=TokenPrompt(self._prompt, "prompt"),
            sampling=SamplingFields(seed=7, ignore_eos=True),
            max_tokens=max_tokens,
            num_logprobs=1,
            num_choices=num_choices,
        )
        tenant = TenantRecord(tenant_id=tenant_id)
        record = self.gateway.submission.begin(request_id, dialect="openai")
        reservation = await self.gateway.submission.reserve(tenant, record)
        model = await self.gateway.submission.choose(reservation, MODEL)
        merger = await self.gateway.submission.submit(reservation, [generation], model)
        merger.close()
        return merger.outputs[0]

    async def ended(self, output: RequestOutput) -> HearthError | None:
        async with asyncio.timeout(120):  # virtual
            while output.end is None:
                assert self.is_each_placement_of_one
                await asyncio.sleep(0.05)
        return output.end.error

    @property
    def is_each_placement_of_one(self) -> bool:
        streams = self.gateway._driver._streams
        return all(
            each.placement is None or streams._by_placement[each.placement.placement_id] is each
            for each in streams._by_request.values()
        )

    def leftovers(self) -> dict[str, Any]:
        """The number of objects that processes still hold for requests, by name."""
        found: dict[str, Any] = {
            "streams": len(self.gateway._driver),
            "early entries": len(self.gateway._driver._streams._early),
            "queued": len(self.scheduler._queues),
            "placing": len(self.scheduler._placing),
            "unserved": len(self.scheduler._unserved),
        }
        for worker in self.workers:
            found[f"{worker.worker_id} blocks"] = not worker.is_empty
            if worker.prefill is not None:
                found[f"{worker.worker_id} prefills"] = len(worker.prefill._prefills)
            if worker.decode is not None:
                decode, expected = worker.decode, worker.receiver._placements
                found[f"{worker.worker_id} placements"] = len(decode._placements)
                found[f"{worker.worker_id} endings"] = len(decode._ended)
                found[f"{worker.worker_id} outputs"] = len(decode._output_buffer)
                found[f"{worker.worker_id} handoffs"] = len(decode._active_handoffs._under_way)
                found[f"{worker.worker_id} staging"] = len(expected._expected)
                found[f"{worker.worker_id} copies"] = len(expected._num_copying)
        return {name: count for name, count in found.items() if count}

    async def settled(self) -> None:
        """Waits until leases, deadlines and acknowledgements have released everything."""
        try:
            async with asyncio.timeout(150):  # virtual
                while self.leftovers():
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(f"left behind: {self.leftovers()}") from None


@asynccontextmanager
async def fleet(model_dir: Path, files: ModelFiles) -> AsyncIterator[Fleet]:
    """Fails if any handler or task raised an unexpected exception."""
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    made = Fleet(model_dir, files)
    with structlog.testing.capture_logs() as logs:
        await made.start()
        try:
            yield made
        finally:
            await made.stop()
    assert not broken, broken
    errors = [each for each in logs if each["log_level"] in ("error", "critical")]
    assert not errors, errors
