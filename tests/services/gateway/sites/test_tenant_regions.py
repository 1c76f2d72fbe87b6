"""Two sites of real services in two regions: what a tenant may not leave in the other one is not on
the link, nor in its NATS, its Redis, logs, spans and files.

The same search finds a tenant that may be everywhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import structlog

from shared.block_hash import extend_chain, root_hash, root_key
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.subjects import at_site
from shared.tenancy.audit import AUDIT
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.telemetry.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.simulation.checks.expected import states_of
from tests.support.canaries.canary import Canary
from tests.support.canaries.redis_data import redis_data
from tests.support.canaries.search import CanarySearch
from tests.support.services.linked_sites import MODEL, LinkedPair, LiveSite, linked_pair
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOME, OTHER = "eu", "us"
# Tenants of site a: by allowed regions, by a region class, and one that may be everywhere.
BOUND, CLASSED, FREE = "bound", "classed", "free"
LIMITS = {BOUND: {"allowed_regions": [HOME]}, CLASSED: {"region_class": "europe"}, FREE: {}}
NUM_BLOCKS, BLOCK_SIZE = 20, 16  # of the worker at home: room for one request at a time
NUM_TOKENS = 40
CONTENT_CHARS = 40  # each of three bytes, which are three tokens
TEMPLATE_TOKENS = 12  # at the start of every prompt, and their KV; more than there are
RANDOM = Random(11)


@dataclass
class World:
    sites: LinkedPair
    receiver: OtlpReceiver
    folder: Path
    lines: list[str]  # of all logs
    canaries: list[Canary] = field(default_factory=list)

    async def ask(self, site: LiveSite, tenant_id: str, num_tokens: int = NUM_TOKENS) -> str:
        """Sends a new secret of a tenant; returns the worker that has answered."""
        content = "".join(chr(RANDOM.randrange(0x4E00, 0x9F00)) for _ in range(CONTENT_CHARS))
        self.canaries.append(await self.canary_of(tenant_id, content))
        response = await site.chat(content, num_tokens, key=f"key of {tenant_id}")
        answer = response.json()
        if response.status_code != 200:
            return str(answer["error"]["code"])
        return str(answer["hearth"]["decode_worker"])

    async def canary_of(self, tenant_id: str, content: str) -> Canary:
        """Returns what a request of site a with this content must not leave elsewhere."""
        message = {"role": "user", "content": content}
        prompt = await self._tokens(messages=[message])
        root = root_hash(tenant_id, "r1", key=root_key("secret of a"))
        there = root_hash(
            at_site("a", tenant_id), "r1", cache_salt=root.hex(), key=root_key("secret of b")
        )
        hashes = [each for own in (root, there) for each in extend_chain(own, prompt, BLOCK_SIZE)]
        return Canary(
            tenant_id=tenant_id,
            texts=(content,),
            token_ids=(await self._tokens(prompt=content, add_special_tokens=False),),
            block_hashes=tuple(hashes),
            kv=(b"".join(states_of(prompt)[TEMPLATE_TOKENS:]),),
        )

    async def _tokens(self, **body: Any) -> list[int]:
        response = await self.sites.a.http.post("/tokenize", json={"model": MODEL, **body})
        return list(response.raise_for_status().json()["tokens"])

    async def found(self, place: str) -> set[str]:
        """Returns the tenants of which a place has anything."""
        search = CanarySearch(self.canaries)
        return {each.tenant_id for data in await self.data(place) for each in search.find(data)}

    async def data(self, place: str) -> list[bytes]:
        b = self.sites.b
        match place:
            case "link":
                assert self.sites.recorded is not None
                return [self.sites.recorded.recorded]
            case "nats" | "redis":
                return [b.relays[place].recorded]
            case "keys of Redis":
                return [await redis_data(b.redis_url)]
            case "caches":
                executors = (each._worker.loop.executor for each in b.workers)
                return [bytes(each._states) for each in executors]  # type: ignore[attr-defined]
            case "logs":
                return [line.encode() for line in self.lines]
            case "spans":
                return [span.SerializeToString() for _, span in self.receiver.spans]
            case "files":
                return [each.read_bytes() for each in self.folder.rglob("*") if each.is_file()]
            case _:
                raise ValueError(place)


PLACES = ("link", "nats", "redis", "keys of Redis", "caches")  # with data of a tenant served there
SILENT = ("logs", "spans", "files")  # with data of no tenant


@pytest.fixture(scope="module")
def lines() -> Iterator[list[str]]:
    """The lines of all logs."""
    found, before = list[str](), structlog.get_config()

    def take(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        found.append(json.dumps(event, default=repr))
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, take])
    try:
        yield found
    finally:
        structlog.configure(**before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> AsyncIterator[World]:
    """Site a has room for one request; site b has room for many."""
    folder = tmp_path_factory.mktemp("sites")
    model_dir = write_model_dir(folder / "tiny")
    with otlp_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        async with linked_pair(folder, model_dir, regions=(HOME, OTHER), is_recorded=True) as sites:
            for each in (sites.a, sites.b):
                await each.start(site=each.name)
                await each.add_index()
            await sites.a.add_worker(num_blocks=NUM_BLOCKS)
            await sites.b.add_worker(num_blocks=512, max_batch_tokens=256)
            await _add_tenants(sites)
            await until(lambda: all(_is_ready(each) for each in (sites.a, sites.b)))
            await until(lambda: _knows_other(sites.a))
            yield World(sites, receiver, folder, lines)


def _is_ready(site: LiveSite) -> bool:
    return site.gateway.readiness().ready


def _knows_other(site: LiveSite) -> bool:
    known = site.scheduler._workers._known
    return any("/" in each for each in known) and any("/" not in each for each in known)


async def _add_tenants(sites: LinkedPair) -> None:
    """Site b has tenants of the same names, whose clients call the wrong region there."""
    for site in (sites.a, sites.b):
        store = RedisStore(site.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
        admin = TenantAdmin(store, lambda: 1.0)
        for name, limits in LIMITS.items():
            await admin.add(name, limits, f"key of {name}")
        await store.close()


async def test_nothing_of_a_bound_tenant_reaches_the_other_region(world: World) -> None:
    """Requests of both tenants want the one place at home: the free ones leave."""
    asked = (world.ask(world.sites.a, name) for name in (*LIMITS,) * 4)
    served = await asyncio.gather(*asked)
    assert {*served[::3], *served[1::3]} == {"worker"}
    assert any(each.startswith("b/") for each in served[2::3])
    await until(lambda: len(world.receiver.spans) >= len(served))
    for place in PLACES:
        await _until_free_is_found(world, place)
    for place in SILENT:
        assert await world.data(place), place
        assert await world.found(place) == set(), place
    await _refused_in_the_other_region(world)
    await _without_a_worker_at_home(world)


async def _until_free_is_found(world: World, place: str) -> None:
    async def found() -> set[str]:
        return await world.found(place)

    assert await until(found) == {FREE}, place


async def _refused_in_the_other_region(world: World) -> None:
    """The gateway refuses, counts and has it audited; nothing of the bodies goes on."""
    b = world.sites.b
    totals = b.gateway._health_monitor.refusals.totals
    before = totals["gateway"]
    for name in (BOUND, CLASSED):
        assert await world.ask(b, name) == "no_region_allowed"
    assert totals["gateway"] == before + 2

    async def audited() -> bool:
        lines = await redis_data(b.redis_url, f"{AUDIT}:refusals")
        return all(name.encode() in lines for name in (BOUND, CLASSED))

    await until(audited)
    for place in (*PLACES, *SILENT):
        assert await world.found(place) <= {FREE}, place


async def _without_a_worker_at_home(world: World) -> None:
    """Bound tenants get an error, the other one is served elsewhere."""
    await world.sites.a.workers.pop().stop()
    await until(lambda: not world.sites.a.scheduler._workers.knows("worker"))
    for name in (BOUND, CLASSED):
        assert await world.ask(world.sites.a, name) == "no_capacity"
    assert (await world.ask(world.sites.a, FREE)).startswith("b/")
    for place in (*PLACES, *SILENT):
        assert await world.found(place) <= {FREE}, place
