"""A scheduler among other sites, on the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from services.scheduler.service import MAX_PLACING
from shared import subjects
from shared.errors import Overloaded, WorkerBusy
from shared.messages import (
    Alive,
    DecodeStarted,
    Placed,
    PlacementFailed,
    PrefixDigest,
    ReadSiteModels,
    ReportAlive,
    Request,
    SiteLoad,
    SiteModel,
    SiteModels,
    SiteState,
    StartDecode,
)
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import region_classes
from shared.sites.prefix_fingerprints import (
    DIGEST_TOKENS,
    PrefixFingerprints,
    pack_fingerprints,
)
from shared.sites.site_states import models_id
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import Rig, eventually
from tests.support.records import model_card
from tests.support.world.bus import SimulatedBus
from tests.support.world.clock import run

CARD = model_card(max_context_tokens=100_000)
LOAD = SiteLoad(num_free_blocks=10_000, num_total_blocks=10_000)
MODELS = (SiteModel(CARD),)
LONG = 2000  # tokens: 0.22 s at a speed that is not measured


@dataclass
class Peer:
    """A gateway of another site, called after it, which takes each request unless it `refuses`."""

    bus: SimulatedBus
    refuses: bool = False
    has_models: bool = True
    started: list[StartDecode] = field(default_factory=list)
    region: str = ""
    num_states: int = 0
    num_digests: dict[str, int] = field(default_factory=dict)  # by region class

    @property
    def site(self) -> str:
        return self.bus.process_id

    @property
    def gateway_id(self) -> str:
        return f"{self.site}/{self.site}"

    def arriving(self, role: str, process: str, verb: str) -> str:
        return f"hearth.v1.linked.{self.site}.{role}.{process}.-.{verb}"

    async def join(self) -> None:
        to_it = f"hearth.v1.site.{self.site}.decode.{self.site}.-"
        await self.bus.serve(f"{to_it}.start", StartDecode, self._start)
        models = SiteModels(gateway_id=self.gateway_id, models_id=models_id(MODELS), models=MODELS)
        of_gateway = f"hearth.v1.site.{self.site}.gateway.{self.site}.-"
        await self.bus.serve(f"{of_gateway}.models", ReadSiteModels, lambda _: models)
        alive = Alive(epoch=1, host="", uptime_s=1.0)
        await self.bus.serve(f"{to_it}.alive", ReportAlive, lambda _: alive)

    def _start(self, message: StartDecode) -> DecodeStarted:
        self.started.append(message)
        if self.refuses:
            raise WorkerBusy("full")
        return DecodeStarted(placement_id=message.placement_id, num_cached_tokens=0)

    async def send_state(self) -> None:
        self.num_states += 1
        state = SiteState(
            gateway_id=self.gateway_id,
            epoch=1,
            sequence_number=self.num_states,
            region=self.region,
            models_id=models_id(MODELS if self.has_models else ()),
            loads=(LOAD,) if self.has_models else (),
        )
        region = self.region or subjects.NO_REGION
        await self.bus.publish(self.arriving("gateway", self.site, f"state.{region}"), state)

    async def send_digest(self, request: Request, *, holds: bool, num: int | None = None) -> None:
        """Sends all fingerprints of a prompt, or the first `num`."""
        number = self.num_digests.get(request.region_class, 0) + 1
        self.num_digests[request.region_class] = number
        prompt = PrefixFingerprints(request.cache_root, request.block_hashes, request.block_size)
        packed = pack_fingerprints(map(prompt.at, range(len(prompt) if num is None else num)))
        digest = PrefixDigest(
            gateway_id=self.gateway_id,
            epoch=1,
            sequence_number=number,
            is_first=number == 1,
            added=packed if holds else b"",
            removed=b"" if holds else packed,
            region_class=request.region_class,
        )
        await self.bus.publish(self.arriving("scheduler", subjects.ANY, "digest"), digest)


ROUND_TRIPS_S = {"near": 0.02, "far": 0.1}


CLASSES = region_classes(["eu=fr,de", "home=fr"])


def scenario(test: Callable[[Rig, Peer, Peer], Awaitable[None]], **options: int) -> None:
    """Home is in `fr`, near in `us` and far in `de`."""

    async def play() -> None:
        rig = Rig(RegionCheck("fr", CLASSES), site="home", region="fr", **options)
        rig.network.distance_s = lambda sender, receiver: sum(
            ROUND_TRIPS_S.get(each, 0.0) / 2 for each in (sender, receiver)
        )
        await rig.start()
        near, far = (
            Peer(rig.network.bus(name, regions=RegionCheck(region, CLASSES)), region=region)
            for name, region in (("near", "us"), ("far", "de"))
        )
        for each in (near, far):
            await each.join()
        reporting = asyncio.create_task(report(near, far))
        await asyncio.sleep(8)  # the round trips are measured
        await test(rig, near, far)
        reporting.cancel()
        await rig.service.stop()

    run(play())


async def report(*peers: Peer) -> None:
    while True:
        for each in peers:
            await each.send_state()
        await asyncio.sleep(1)


async def worker_of(rig: Rig, number: int) -> str:
    await rig.submit(submit_of(f"r{number}", num_prompt_tokens=LONG))
    placed = await rig.result(num=number)
    assert isinstance(placed, Placed), placed
    return placed.worker_id.partition("/")[0]


def of_class(region_class: str, *regions: str) -> Request:
    made = submit_of("r", num_prompt_tokens=LONG, allowed_regions=regions).request
    return msgspec.structs.replace(made, region_class=region_class)


def test_what_a_site_holds_of_a_class_counts_for_requests_that_may_be_there() -> None:
    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        await far.send_digest(of_class("eu"), holds=True)
        sites = rig.service._sites
        await eventually(lambda: len(sites.prefixes) == LONG // DIGEST_TOKENS)
        (worker_id,) = sites._workers_of["far"]
        expected = {worker_id: 120}
        assert sites.num_cached_blocks(of_class("eu", "fr", "de")) == expected
        assert sites.num_cached_blocks(of_class("eu", "fr")) == {}
        assert sites.num_cached_blocks(of_class("")) == {}
        assert sites.num_cached_blocks(of_class("home", "fr")) == {}
        await far.send_digest(of_class("eu"), holds=False)
        await eventually(lambda: not sites.prefixes)

    scenario(test)


def test_digest_of_a_class_that_excludes_its_site_is_refused_and_counted() -> None:
    """The bus of a site with a bug lets it out; nats-server would not."""

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        refusals, prefixes = rig.service.health_monitor.refusals, rig.service._sites.prefixes
        near.bus.regions.own_classes = ("eu",)
        await near.send_digest(of_class("eu"), holds=True)
        await eventually(lambda: refusals.totals["site"] == 1)
        assert not prefixes
        await far.send_digest(of_class("eu"), holds=True)
        await eventually(lambda: len(prefixes) > 0)
        far.region = "us"  # says the link from now on
        await far.send_state()
        await far.send_digest(of_class("eu"), holds=True)
        await eventually(lambda: refusals.totals["site"] == 2)
        assert not prefixes, "what it sent before is gone"

    scenario(test)


def test_site_that_holds_the_prompt_gets_it_until_it_is_evicted() -> None:
    request = submit_of("r", num_prompt_tokens=LONG).request

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        assert await worker_of(rig, 1) == "near"
        await far.send_digest(request, holds=True, num=1)
        await asyncio.sleep(1)
        assert await worker_of(rig, 2) == "near", "the distance costs more than is saved"
        await far.send_digest(request, holds=True)
        await asyncio.sleep(1)
        assert await worker_of(rig, 3) == "far"
        await far.send_digest(request, holds=False)
        await asyncio.sleep(1)
        assert await worker_of(rig, 4) == "near"
        await far.send_digest(request, holds=True)
        await asyncio.sleep(1)
        assert await worker_of(rig, 5) == "far"

    scenario(test)


def test_what_a_lost_site_held_is_forgotten() -> None:
    request = submit_of("r", num_prompt_tokens=LONG).request

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        await far.send_digest(request, holds=True)
        prefixes = rig.service._sites.prefixes
        await eventually(lambda: prefixes.num_blocks(request) == {"far": 120})
        rig.network.is_dropped = lambda subject, sender, receiver: sender == "far"
        await eventually(lambda: prefixes.num_blocks(request) == {})

    scenario(test)


def test_site_that_refuses_is_avoided_whatever_it_reports() -> None:
    """Each state says that it is free."""

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        near.refuses = True
        for number in range(1, 101):
            assert await worker_of(rig, number) == "far"
            await near.send_state()
            await asyncio.sleep(0.1)
        assert 3 <= len(near.started) <= 7, "of 100, in more than 10 s"
        near.refuses = False
        await asyncio.sleep(10)
        assert await worker_of(rig, 101) == "near"

    scenario(test)


def test_request_waits_while_the_only_site_refuses() -> None:
    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        near.refuses = far.refuses = True
        await rig.submit(submit_of("r", num_prompt_tokens=LONG))
        await asyncio.sleep(15)
        assert rig.results() == []
        assert len(near.started) + len(far.started) <= 16
        near.refuses = False
        placed = await rig.result()
        assert isinstance(placed, Placed) and placed.worker_id.startswith("near/")

    scenario(test)


def test_request_that_a_full_queue_would_reject_goes_to_another_site() -> None:
    """Home has room for two more in its queue, which have not waited long enough to leave."""

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        await rig.worker("decode-0", num_free_blocks=0)
        for number in range(2):
            await rig.submit(submit_of(f"waiting-{number}", num_prompt_tokens=LONG))
        await rig.submit(submit_of("leaving", num_prompt_tokens=LONG))
        placed = await rig.result(within_s=0.2)
        assert isinstance(placed, Placed) and placed.request_id == "leaving"
        assert [each.is_queueable for each in near.started] == [True], "it may wait there"
        near.refuses = far.refuses = True
        await rig.submit(submit_of("lost", num_prompt_tokens=LONG))
        failed = await rig.result(num=2, within_s=0.3)
        assert isinstance(failed, PlacementFailed)
        assert (failed.request_id, failed.failure.code) == ("lost", "overloaded")
        near.has_models = far.has_models = False
        await asyncio.sleep(1.5)
        with pytest.raises(Overloaded, match="the queue is full"):
            await rig.submit(submit_of("nowhere", num_prompt_tokens=LONG))
        assert len(rig.service._queues) == 2

    scenario(test, max_queued_requests=2)


def test_request_that_must_not_wait_leaves_a_home_that_is_full() -> None:
    """Others wait at home: it would be rejected before any worker is looked at."""

    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        await rig.worker("decode-0", num_free_blocks=0)
        await rig.submit(submit_of("waiting", num_prompt_tokens=LONG))
        await eventually(lambda: len(rig.service._blocked.all()) == 1)
        await rig.submit(submit_of("r1", num_prompt_tokens=LONG, is_queueable=False))
        placed = await rig.result(within_s=0.2)
        assert isinstance(placed, Placed) and placed.request_id == "r1"
        assert [each.is_queueable for each in near.started] == [False]

    scenario(test)


def test_requests_that_must_not_wait_and_are_next_leave_when_home_gets_full() -> None:
    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        await rig.worker("decode-0", num_free_blocks=0)
        submits = [submit_of("first", num_prompt_tokens=LONG)]
        submits += [
            submit_of(f"r{number}", num_prompt_tokens=LONG, is_queueable=False)
            for number in range(MAX_PLACING + 5)
        ]
        await asyncio.gather(*map(rig.submit, submits))
        await eventually(lambda: len(rig.results()) == MAX_PLACING + 5, within_s=0.5)
        assert {type(each) for each in rig.results()} == {Placed}

    scenario(test)


def test_workers_that_have_stopped_are_forgotten() -> None:
    async def test(rig: Rig, near: Peer, far: Peer) -> None:
        workers_of = rig.service._sites._workers_of
        assert [len(workers_of[each]) for each in ("near", "far")] == [1, 1]
        near.has_models = False
        await eventually(lambda: not workers_of["near"])

    scenario(test)
