"""Two sites of real services, linked by leaf nodes: a site serves for the other one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
import structlog

from services.scheduler.throughput import Speed
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost
from shared.errors import SenderMismatch
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import LinkLoad, ReadTenantCopies, TenantCopies, WorkerLoad
from shared.receipts.jws import parsed_jws
from shared.receipts.receipt import AnswerReceipt, IssuedReceipt, PlacedProcess, receipt_of
from shared.sites.linked_sites import DOUBLED
from shared.sites.tenant_names import SiteTenantNames, shared_name
from shared.subjects import at_site, is_at_site, tenants
from shared.tenancy.declared_classes import declared_classes
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.nats_clients import connect_ordered
from tests.support.services.linked_sites import (
    PASSWORD,
    REGION,
    STEP_S,
    LinkedPair,
    LiveSite,
    SiteExecutor,
    linked_pair,
)
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = 100  # tokens: 1 s
NEW = count(100)  # of long prompts that no site has
SMALL = 20  # blocks
TOKEN_S = 0.01  # of both sites: what a site holds of a prompt outweighs any round trip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LinkedPair]:
    """Only site b has a worker."""
    folder = tmp_path_factory.mktemp("sites")
    async with linked_pair(folder, write_model_dir(folder / "tiny")) as pair:
        for each in (pair.a, pair.b):
            await each.start(site=each.name)
        await pair.b.add_index()
        await pair.b.add_worker(num_blocks=64, max_batch_tokens=128)
        await until(lambda: pair.a.gateway.readiness().ready and pair.b.gateway.readiness().ready)
        yield pair


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def linked(sites: LinkedPair) -> None:
    """Waits for what the test before has cut or ended."""
    await until(lambda: any(map(is_at_site, sites.a.scheduler._workers._known)))


async def restore(sites: LinkedPair) -> None:
    """Restores the link that was cut, and waits for messages over it."""
    received = sites.a.gateway._bus.site_bytes.received
    before = received["b"]
    sites.restore()
    await until(lambda: received["b"] > before)


async def text_of(site: LiveSite, content: str, num_tokens: int) -> str:
    response = await site.chat(content, num_tokens)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_model_of_another_site_is_served(sites: LinkedPair) -> None:
    here, there = sites.b, sites.a
    expected = await text_of(here, "one", 8)
    assert await text_of(there, "one", 8) == expected != ""
    assert "".join([each async for each in there.stream("one", 8)]) == expected
    several = (await there.chat("one", 8, n=2, temperature=1.0, seed=7)).json()
    same = (await here.chat("one", 8, n=2, temperature=1.0, seed=7)).json()
    assert several["choices"] == same["choices"]
    answer = await there.chat("one", 4)
    served = answer.json()["hearth"]
    assert served["decode_worker"].startswith("b/gateway/")
    receipt = await receipt_of_answer(there, answer)
    (attempt,) = receipt.prompts[0].tries
    assert (receipt.gateway.site, receipt.gateway.id) == ("a", "gateway")
    assert attempt.decode == PlacedProcess(id=served["decode_worker"], site="b", region=REGION)


async def receipt_of_answer(site: LiveSite, answer: httpx.Response) -> AnswerReceipt:
    path = f"/v1/requests/{answer.headers['x-request-id']}/receipt"
    issued = msgspec.json.decode((await site.http.get(path)).content, type=IssuedReceipt)
    return receipt_of(parsed_jws(issued.receipt).payload)


async def until_declared(site: LiveSite) -> None:
    """Waits until the site's gateway has declared its classes."""

    async def is_declared() -> bool:
        return bool((await declared_classes(site.gateway.tenancy.stores.slow)).regions)

    await until(is_declared)


async def in_class(site: LiveSite, region_class: str, tenant_id: str = "tenant-1") -> None:
    """Gives a tenant of the site a region class."""
    await until_declared(site)
    await TenantAdmin(site.gateway.tenancy.stores.slow, time.time).change(
        tenant_id, {"region_class": region_class}
    )
    site.gateway.api_keys._known.clear()


async def test_data_of_a_region_class_crosses_to_a_site_of_the_class(sites: LinkedPair) -> None:
    expected = await text_of(sites.b, "three", 8)
    pool = sites.b.workers[0]._worker.loop.engine.pool
    assert pool.event_classes[0] == ""
    await in_class(sites.a, "europe")
    try:
        assert await text_of(sites.a, "three", 8) == expected != ""
        await until(lambda: pool.event_classes == ["", "europe"])
        for each in (sites.a.gateway, sites.a.scheduler, sites.b.gateway, sites.b.scheduler):
            assert (each._bus.regions.num_refused, each._bus.regions.num_denied) == (0, 0)
    finally:
        await in_class(sites.a, "")


async def test_cut_link_pauses_a_stream(sites: LinkedPair) -> None:
    """The only worker is behind the link: the stream ends after the link is back."""
    expected = await text_of(sites.b, "two", LONG)
    pieces: list[str] = []
    async for piece in sites.a.stream("two", LONG):
        pieces.append(piece)
        if len(pieces) == 10:
            sites.cut()
            asyncio.get_running_loop().call_later(1.0, sites.restore)
    assert "".join(pieces) == expected
    await until(lambda: sites.a.gateway.readiness().ready)
    assert await text_of(sites.a, "one", 4), "used again"


def long_prompt(number: int) -> str:
    return f"{number} " + "and so on " * 40


async def served(site: LiveSite, content: str, num_tokens: int) -> tuple[str, str]:
    """Returns the text, and the worker that computed the prompt."""
    answer = (await site.chat(content, num_tokens)).json()
    text, hearth = answer["choices"][0]["message"]["content"], answer["hearth"]
    return text, hearth["prefill_worker"] or hearth["decode_worker"]


@pytest_asyncio.fixture(loop_scope="module")
async def slow_home(sites: LinkedPair) -> AsyncIterator[LinkedPair]:
    """Site a has a worker that needs a second for a long prompt, as its scheduler has learnt."""
    slow = StepCost(base_s=STEP_S, per_token_s=0.003)

    async def is_away() -> bool:
        _, prefilled_by = await served(sites.a, long_prompt(next(NEW)), 4)
        return prefilled_by.startswith("b/gateway/")

    async with sites.a.worker(
        num_blocks=64, cost=slow, roles=("decode",), process_id="worker.slow"
    ):
        await until(is_away)
        yield sites


async def test_long_prompt_is_computed_at_the_other_site(slow_home: LinkedPair) -> None:
    sites = slow_home
    expected = await text_of(sites.b, long_prompt(99), 8)
    answer = await sites.a.chat(long_prompt(99), 8)
    assert answer.json()["choices"][0]["message"]["content"] == expected
    (attempt,) = (await receipt_of_answer(sites.a, answer)).prompts[0].tries
    assert (attempt.decode.site, attempt.decode.region) == ("a", REGION)
    assert attempt.prefill is not None
    assert attempt.prefill.id.startswith("b/gateway/")
    (hop,) = attempt.kv_hops
    assert (hop.source.site, hop.source.region, hop.num_tokens > 300) == ("b", REGION, True)
    await until(lambda: load_of(sites.a).site_pushes)
    (pushed,) = load_of(sites.a).site_pushes
    assert pushed.site == "b" and pushed.num_tokens > 300
    assert pushed.num_bytes == pushed.num_tokens * STATE_BYTES


def load_of(site: LiveSite) -> WorkerLoad:
    load = site.workers[-1].report().heartbeat.load
    assert load is not None
    return load


async def test_link_that_is_cut_in_a_push_costs_a_pause(slow_home: LinkedPair) -> None:
    """The rest of the prompt is computed at home."""
    sites = slow_home
    expected = await text_of(sites.b, long_prompt(98), 8)
    executor = sites.b.workers[0]._worker.loop.executor
    assert isinstance(executor, SiteExecutor)
    num_frames = load_of(sites.a).num_kv_frames
    normal, executor._cost = executor._cost, StepCost(base_s=1.0)
    answer = asyncio.create_task(served(sites.a, long_prompt(98), 8))
    await until(lambda: load_of(sites.a).num_kv_frames > num_frames)
    sites.cut()
    assert await answer == (expected, "worker.slow")
    executor._cost = normal
    await restore(sites)


def long(number: int) -> str:
    """Takes most of a context, with two fingerprints."""
    return f"{number} " + "and so on " * 30


async def serving(site: LiveSite, content: str, key: str) -> str:
    response = await site.chat(content, 4, key=key)
    assert response.status_code == 200, response.text
    return str(response.json()["hearth"]["decode_worker"]).partition("/")[0]


@contextlib.contextmanager
def refusing(site: LiveSite) -> Iterator[None]:
    """The site takes no request of another one."""
    assert site.gateway._sites is not None
    placements = site.gateway._sites._placements
    most, placements._max_held = placements._max_held, 0
    try:
        yield
    finally:
        placements._max_held = most


@pytest.mark.parametrize(
    ("region_class", "first"), [("", 31), pytest.param("europe", 41, marks=pytest.mark.long)]
)
async def test_prompt_goes_to_the_site_that_still_has_it(
    sites: LinkedPair, monkeypatch: pytest.MonkeyPatch, region_class: str, first: int
) -> None:
    """Two sites serve the model, and each has computed one of two prompts, which no other test
    has in any length. A tenant whose regions have changed is not cached for minutes.
    """
    key = f"key of {first}"
    await until_declared(sites.a)
    admin = TenantAdmin(sites.a.gateway.tenancy.stores.slow, time.time)
    await admin.add(f"tenant-{first}", {"region_class": region_class}, key)
    scheduler = sites.a.scheduler
    prefixes, workers = scheduler._sites.prefixes, scheduler._workers

    def are_equally_fast() -> bool:
        for each in workers._models.values():
            monkeypatch.setattr(
                each, "observe", lambda *_: Speed(token_s=TOKEN_S, is_measured=True)
            )
        fast = {each[0] for each in workers._known if workers.speed(each).token_s == TOKEN_S}
        return fast == {"b", "c"}

    def are_open() -> bool:
        """Whether neither site is busy, or avoided for a request that it has refused."""
        now = asyncio.get_running_loop().time()
        rows = [each.worker for name, each in workers._known.items() if name[0] in "bc"]
        is_idle = all(
            not (each.is_avoided or each.num_running or each.num_waiting or each.busy_until > now)
            for each in rows
        )
        return is_idle and not scheduler._sites.closed(now)

    async def chosen(*numbers: int) -> list[str]:
        """Returns the sites that serve these prompts, one after the other."""
        found = []
        for number in numbers:
            await until(are_open)
            found.append(await serving(sites.a, long(number), key))
        return found

    def held(site: str) -> set[int]:
        """The fingerprints of what the site has, beside what tests before have left."""
        gateways = prefixes._sites[site].gateways.values() if site in prefixes._sites else ()
        of_class = (each for each in gateways if each.region_class == region_class)
        return set().union(*(each.fingerprints for each in of_class)) - before

    before: set[int] = set()
    before = held("b") | held("c")
    one, two = first, first + 1
    async with sites.third_site() as c:
        await c.add_index()
        await c.add_worker(num_blocks=64)
        await until(lambda: are_equally_fast() and c.gateway.readiness().ready)
        with refusing(c):
            assert await serving(sites.a, long(one), key) == "b"
        with refusing(sites.b):
            assert await serving(sites.a, long(two), key) == "c"
        await until(lambda: (len(held("b")), len(held("c"))) == (2, 2))
        of_two = held("c")
        assert await chosen(one, two) == ["b", "c"]
        for number in range(first + 2, first + 6):
            await text_of(c, long(number), 4)
        await until(lambda: not held("c") & of_two)
        with refusing(c):
            assert await serving(sites.a, long(two), key) == "b"
        await until(lambda: held("b") >= of_two)
        assert await chosen(one, two) == ["b", "b"]


@pytest.mark.long
async def test_withdrawn_tenants_leave_no_kv_at_the_other_site(sites: LinkedPair) -> None:
    """One has a class, another one shares its name at site b, a third one stays."""
    store, names = sites.a.gateway.tenancy.stores.slow, sites.b.gateway._sites._tenants
    pool = sites.b.workers[0]._worker.loop.engine.pool
    keys = {each: f"key of {each}" for each in ("bound", "shared", "free")}
    await until_declared(sites.a)
    for tenant_id, key in keys.items():
        bounds = {"region_class": "europe"} if tenant_id == "bound" else {}
        await TenantAdmin(store, time.time).add(tenant_id, bounds, key)
    before, held_under = names["a"], {}
    for tenant_id, key in keys.items():
        if tenant_id == "shared":
            names["a"] = SiteTenantNames(max_named=0)
        held_under[tenant_id] = names["a"].of(at_site("a", tenant_id))
        assert (await sites.a.chat(long(50), 4, key=key)).status_code == 200
        names["a"] = before
    assert held_under["shared"] == shared_name("a/shared") != "a/shared"

    def cached() -> dict[str, int]:
        return {each: pool.num_blocks_of(name) for each, name in held_under.items()}

    await until(lambda: all(cached().values()))
    for tenant_id in ("bound", "shared"):
        await in_class(sites.a, "elsewhere", tenant_id)
    await until(lambda: not cached()["bound"] and not cached()["shared"])
    assert cached()["free"]


def prompt(number: int) -> str:
    """Takes more than half of the KV cache of site a, and shares no block with another one."""
    return f"{number} " + "and so on " * 16


@pytest_asyncio.fixture(loop_scope="module")
async def small_home(sites: LinkedPair) -> AsyncIterator[LinkedPair]:
    """Site a has a worker, with room for one request."""
    async with sites.a.worker(num_blocks=SMALL):
        yield sites


async def test_full_site_sends_requests_on(small_home: LinkedPair) -> None:
    sites = small_home
    alone = (await sites.a.chat("three", 8)).json()["hearth"]
    assert alone["decode_worker"] == "worker"
    expected = await asyncio.gather(*(text_of(sites.b, prompt(i), LONG) for i in range(3)))
    answers = await asyncio.gather(*(sites.a.chat(prompt(i), LONG) for i in range(3)))
    workers = [each.json()["hearth"]["decode_worker"].partition("/")[0] for each in answers]
    assert set(workers) == {"worker", "b"}
    assert [each.json()["choices"][0]["message"]["content"] for each in answers] == expected


async def test_stream_continues_at_home_when_the_link_is_cut(small_home: LinkedPair) -> None:
    sites = small_home
    expected = await asyncio.gather(*(text_of(sites.b, prompt(i), LONG) for i in range(3, 6)))
    pieces: list[str] = []
    streams = [asyncio.create_task(_read(sites, prompt(i), pieces)) for i in range(3, 6)]
    await until(lambda: len(sites.b.gateway._driver) == 2 and len(pieces) > 20)
    sites.cut()
    assert [await each for each in streams] == expected
    moved = sites.a.gateway.metrics.load()
    assert moved.num_resubmissions >= 1 and moved.num_lost_streams == 0
    await restore(sites)
    assert ("b", "tenant-1") in {(each.site, each.tenant_id) for each in moved.site_requests}
    assert num_of(sites.a.gateway._health_monitor, "num_moved") >= 1


async def test_processes_report_what_crossed_the_link(sites: LinkedPair) -> None:
    gateway, scheduler = sites.a.gateway._health_monitor, sites.a.scheduler.health_monitor
    b = sites.b.gateway._health_monitor

    def counts() -> np.ndarray:
        """Of the requests placed at site b, of those that found no room, of those served there."""
        of = ((scheduler, "num_placed"), (scheduler, "num_spilled"), (b, "num_served"))
        return np.array([num_of(*each) for each in of])

    before = counts()
    await text_of(sites.a, "one", 4)  # without a worker at home
    async with sites.a.worker(num_blocks=SMALL):
        await asyncio.gather(*(text_of(sites.a, prompt(i), LONG) for i in range(9, 12)))
    # Measured by the probes of one gateway, not of each model, and again after a cut.
    (seen,) = await until(lambda: [each for each in to_b(gateway) if each.round_trip_s is not None])
    assert seen.region == REGION
    assert min(seen.sent_bytes, seen.received_bytes) > 1000
    placed, spilled, served_there = counts() - before
    assert served_there >= placed > spilled >= 2, "the first one had no worker at home"


def num_of(of: HealthMonitor, name: str) -> int:
    return sum(getattr(each, name) for each in of.describe().links)


def to_b(of: HealthMonitor) -> list[LinkLoad]:
    return [each for each in of.describe().links if each.site == "b"]


async def _read(sites: LinkedPair, content: str, all_pieces: list[str]) -> str:
    pieces = []
    async for piece in sites.a.stream(content, LONG):
        pieces.append(piece)
        all_pieces.append(piece)
    return "".join(pieces)


@pytest.mark.long
async def test_two_sites_of_one_name_and_one_key_are_refused_and_named_at_each_of_them(
    sites: LinkedPair,
) -> None:
    """Their secrets are equal, as if they had none; their NATS servers are not."""

    gateway = sites.a.gateway._health_monitor

    def lines() -> set[tuple[str, str, str]]:
        """Returns the events with the sites that they name and that have sent the state."""
        found = {(e["event"], e.get("site", ""), e.get("seen_by", "")) for e in logs}
        return {each for each in found if each[0].endswith("site_doubled")}

    with structlog.testing.capture_logs() as logs:
        async with sites.third_site("b"):
            await until(
                lambda: lines() == {("site_doubled", "b", ""), ("own_site_doubled", "b", "a")}
            )
            (link,) = await until(lambda: [e for e in to_b(gateway) if e.is_cut])
            assert link.problem == DOUBLED
            await until(lambda: not any(map(is_at_site, sites.a.scheduler._workers._known)))
            reads = ReadTenantCopies(gateway_id=at_site("b", "gateway"))
            with pytest.raises(SenderMismatch, match="nothing is taken from site b: "):
                await sites.b.gateway._bus.request(
                    tenants(at_site("a", "gateway")), reads, TenantCopies, timeout_s=LIMIT_S
                )
    await until(lambda: not to_b(gateway)[0].is_cut)
    await until(lambda: any(map(is_at_site, sites.a.scheduler._workers._known)))
    assert await text_of(sites.a, "one", 4)


@pytest.mark.long
async def test_process_that_has_the_name_of_a_linked_site_says_so(sites: LinkedPair) -> None:
    """`HEARTH_SITE` is not the name in its nats.conf: each of the two sites has a line."""
    lines = "'event': 'site_has_own_name'", "sent a SiteState that names a/gateway"
    with structlog.testing.capture_logs() as logs:
        async with sites.third_site("c", claims="a"):
            await until(lambda: all(any(line in str(each) for each in logs) for line in lines))


async def test_a_flood_of_bad_messages_is_one_line_of_the_log(sites: LinkedPair) -> None:
    peer = await connect_ordered(f"nats://gateway:{PASSWORD}@127.0.0.1:{sites.b.nats_port}")
    received = sites.a.gateway._bus.site_bytes.received
    control = "hearth.v1.site.a.decode.gateway.-.control.gateway.-"
    before = received["b"]
    await until(lambda: received["b"] > before)  # the link is back
    before = received["b"]
    with structlog.testing.capture_logs() as logs:
        for each in [b"bad"] * 9_999 + [msgspec.msgpack.encode({"type": "OfALaterRelease"})]:
            await peer.publish(control, each)
        await peer.flush()
        await until(lambda: received["b"] >= before + 3 * 10_000)
    await peer.close()
    (line,) = (each for each in logs if each["event"] == "message_invalid")
    assert line["site"] == "b"
    assert await text_of(sites.a, "one", 4)


@pytest_asyncio.fixture(loop_scope="module")
async def draining(small_home: LinkedPair) -> AsyncIterator[LinkedPair]:
    """The gateway of site b takes no more requests at the end of the test."""
    known = small_home.a.scheduler._workers
    yield small_home
    await until(lambda: not any(map(is_at_site, known._known)))
    await small_home.b.restart_gateway()


async def test_gateway_that_drains_finishes_what_it_has_taken_over(draining: LinkedPair) -> None:
    sites = draining
    expected = await asyncio.gather(*(text_of(sites.b, prompt(i), LONG) for i in range(6, 9)))
    before = sites.a.gateway.metrics.load().num_resubmissions
    pieces: list[str] = []
    streams = [asyncio.create_task(_read(sites, prompt(i), pieces)) for i in range(6, 9)]
    await until(lambda: len(sites.b.gateway._driver) == 2 and len(pieces) > 20)
    await sites.b.gateway.drain()
    assert [await each for each in streams] == expected
    assert sites.a.gateway.metrics.load().num_resubmissions == before
    assert (await sites.a.chat("four", 4)).json()["hearth"]["decode_worker"] == "worker"
