"""What a gateway asks of the index, and reports to the sites whose prompts it has computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from services.gateway.sites.prefix_digests import WITHDRAWN_S, PrefixDigests
from services.gateway.sites.site_requests import site_request
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    FINGERPRINT_BYTES,
    MatchPrefix,
    PrefixDigest,
    PrefixMatch,
    PrefixMatches,
    Request,
    SiteState,
)
from shared.packing import BLOCK_HASH_BYTES
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import region_classes
from shared.sites.tenant_names import shared_name
from shared.subjects import KV_INDEX_GROUP, MATCH, class_of, prefix_digest, without_class
from tests.services.scheduler.literals import submit_of
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.randomness import SeededRandomness

CLASSES = region_classes(["eu=fr,de", "home=de"])
SOON_S = 2.5  # two rounds


@dataclass
class Site:
    """A gateway in `de` that has computed prompts for site a, and an index that holds them all."""

    network: SimulatedNetwork = field(default_factory=SimulatedNetwork)
    sent: list[PrefixDigest] = field(default_factory=list)
    asked: list[MatchPrefix] = field(default_factory=list)
    num_states: int = 0

    async def start(self) -> None:
        bus, clock = self.network.bus("gw", regions=RegionCheck("de", CLASSES)), VirtualClock()
        monitor = HealthMonitor(bus, clock, SeededRandomness(1), roles=("gateway",), region="de")
        self.digests = PrefixDigests("b/gw", bus, clock, monitor)
        index = self.network.bus("index", regions=RegionCheck("de", region_classes(["eu=fr,de"])))
        await index.serve(MATCH, MatchPrefix, self._match, queue=KV_INDEX_GROUP)
        self.network.taps.append(self._tap)
        self.running = asyncio.create_task(self.digests.run())

    def _tap(self, sender: str, subject: str, data: bytes) -> None:
        if without_class(subject) == prefix_digest("a"):
            self.sent.append(msgspec.msgpack.decode(data, type=PrefixDigest))
            assert class_of(subject) == self.sent[-1].region_class

    def _match(self, message: MatchPrefix) -> PrefixMatches:
        self.asked.append(message)
        num_blocks = len(message.block_hashes) // BLOCK_HASH_BYTES
        found = PrefixMatch(worker_id="decode-0", num_blocks=num_blocks)
        return PrefixMatches(state="exact", matches=(found,))

    def compute(self, tenant_id: str, region_class: str = "", name: str = "") -> None:
        """Records a prompt of three fingerprints, under another name if the tenant shares one."""
        asked = request_of(tenant_id, region_class)
        here = site_request(asked, b"p" * 16, "gw", b"k" * 32, retains_class=True)
        here = msgspec.structs.replace(here, tenant_id=name or here.tenant_id)
        self.digests.computed(asked, here)

    async def hear(self, region: str = "fr", for_s: float = SOON_S) -> list[PrefixDigest]:
        """Returns what is sent to site a, a state of which comes each second."""
        self.sent.clear()
        for _ in range(round(for_s)):
            self.num_states += 1
            state = SiteState(
                gateway_id="a/gw", epoch=1, sequence_number=self.num_states, region=region
            )
            self.digests.on_state(state)
            await asyncio.sleep(1.0)
        return list(self.sent)


def request_of(tenant_id: str, region_class: str = "") -> Request:
    made = submit_of("r", gateway_id="a/gw", tenant_id=tenant_id, num_prompt_tokens=400).request
    return msgspec.structs.replace(made, region_class=region_class)


def named(digests: list[PrefixDigest]) -> dict[str, int]:
    """Returns the number of fingerprints that are named, by region class."""
    return {
        each.region_class: len(each.added + each.removed) // FINGERPRINT_BYTES for each in digests
    }


def scenario(test: Callable[[Site], Awaitable[None]]) -> None:
    async def play() -> None:
        site = Site()
        await site.start()
        await test(site)
        site.running.cancel()

    run(play())


def test_each_class_is_asked_and_reported_by_itself() -> None:
    """The index is in no class `home` here: that costs the others nothing."""

    async def test(site: Site) -> None:
        site.compute("homely", "home")
        site.compute("free")
        site.compute("bound", "eu")
        assert named(await site.hear()) == {"": 3, "eu": 3}
        assert {(each.tenant_id, each.region_class) for each in site.asked} == {
            ("a/free", ""),
            ("a/bound", "eu"),
        }

    scenario(test)


def test_withdrawn_tenant_is_forgotten_under_each_of_its_names_and_for_a_while() -> None:
    async def test(site: Site) -> None:
        names = "a/bound", shared_name("a/bound")
        for number, name in enumerate(names):
            site.compute(f"bound{number}", name=name)
        site.compute("free")
        assert named(await site.hear()) == {"": 9}
        site.digests.withdraw("a/bound", False)
        for number, name in enumerate(names):  # its last requests
            site.compute(f"bound{number}", name=name)
        (left,) = await site.hear()
        assert left.is_first and named([left]) == {"": 3}
        await asyncio.sleep(WITHDRAWN_S)
        site.compute("bound0", name=names[0])
        assert named(await site.hear())[""] >= 3

    scenario(test)


def test_tenant_that_may_still_be_here_is_reported_in_its_new_class_at_once() -> None:
    async def test(site: Site) -> None:
        site.compute("bound")
        assert named(await site.hear()) == {"": 3}
        site.digests.withdraw("a/bound", True)
        site.compute("bound", "eu")
        assert named(await site.hear()) == {"": 0, "eu": 3}

    scenario(test)


def test_site_whose_region_changes_learns_no_more_of_any_class() -> None:
    async def test(site: Site) -> None:
        site.compute("bound", "eu")
        site.compute("free")
        assert named(await site.hear()) == {"": 3, "eu": 3}
        assert named(await site.hear("us", 130.0)) == {"": 3}, "snapshots"
        assert named(await site.hear("fr")) == {"eu": 0}
        site.compute("bound", "eu")
        assert named(await site.hear("fr")) == {"eu": 3}

    scenario(test)
