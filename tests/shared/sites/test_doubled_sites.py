"""Sites that cannot be told from another one: nothing of them is taken, and the link says why."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
import structlog

from shared.errors import SenderMismatch
from shared.fleet.fleet_view import FleetView
from shared.lifecycle.health import SILENCE_LIMIT_S
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import Heartbeat, SiteState
from shared.sites.gateway_epochs import DOUBLED_S, site_instance
from shared.sites.link_loads import CUT_S
from shared.sites.linked_sites import DOUBLED, OWN_DOUBLED, OWN_NAME, LinkedSites
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.process import SimulatedProcess
from tests.support.world.randomness import SeededRandomness

INSTANCES = [site_instance((), f"nats-{number}") for number in range(2)]


class LinkedSite:
    """Site a as it sees others."""

    def __init__(self) -> None:
        process, clock = SimulatedProcess("gateway.1"), VirtualClock()
        bus = SimulatedNetwork().bus("gateway.1", process)
        self.refused, self._numbers = bus.refused_sites, count(1)
        self.taken: list[SiteState] = []
        self.linked = LinkedSites(bus, clock, "a")
        self.monitor = HealthMonitor(
            bus,
            clock,
            SeededRandomness(1),
            roles=("gateway",),
            loads=Loads(links=self.linked.loads),
        )

    async def start(self) -> None:
        await self.monitor.start()
        await self.linked.start(self.monitor, self.taken.append)
        await asyncio.sleep(2 * SILENCE_LIMIT_S)  # before, it judges no link

    async def states(self, *states: SiteState, for_s: float) -> None:
        for _ in range(round(for_s)):
            for each in states:
                self.linked._take(each)
            await asyncio.sleep(1.0)

    @property
    def loss(self) -> str:
        """The line of `hearth status` about the only link."""
        view = FleetView()
        beat = Heartbeat(
            process_id="gateway.1", epoch=1, sequence_number=1, roles=("gateway",), state="ready",
            interval_s=0.25, links=self.linked.loads(),
        )  # fmt: skip
        view.observe(beat, 0.0)
        (link,) = view.links()
        return link.loss


def state(gateway_id: str, number: int = 0, *, doubled: tuple[str, ...] = ()) -> SiteState:
    return SiteState(
        gateway_id=gateway_id, epoch=number, sequence_number=1, instance=INSTANCES[number],
        doubled=doubled,
    )  # fmt: skip


async def _refuses(*states: SiteState, event: str, reason: str) -> None:
    """Nothing is taken of a site whose states are these, until it is alone."""
    site, (name, _) = LinkedSite(), states[0].gateway_id.split("/")
    await site.start()
    with structlog.testing.capture_logs() as logs:
        await site.states(*states, for_s=2 * CUT_S)
        num_taken = len(site.taken)
        await site.states(*states, for_s=CUT_S)
        assert len(site.taken) == num_taken <= 2, "two states come before the first returns"
        assert [each["event"] for each in logs] == [event, "link_cut"]
        assert [each["reason"] for each in logs] == [reason, reason]
        assert site.loss.startswith(f"link to site {name}: cut for ") and site.loss.endswith(reason)
        with pytest.raises(SenderMismatch, match=f"nothing is taken from site {name}: "):
            site.refused.check(name)
        if name != "a":  # as long as this process has this name
            await site.states(state(f"{name}/alone"), for_s=DOUBLED_S + CUT_S)
            assert site.loss == "" and len(site.taken) > num_taken
            site.refused.check(name)
            assert [each["event"] for each in logs][2:] == ["link_connected"]
    await site.monitor.stop()


@pytest.mark.parametrize(
    ("states", "event", "reason"),
    [
        ((state("b/gw.1"), state("b/gw.2", 1)), "site_doubled", DOUBLED),
        ((state("b/gw.1", doubled=("a",)),), "own_site_doubled", OWN_DOUBLED),
        ((state("a/gw.1"),), "site_has_own_name", OWN_NAME),
    ],
    ids=lambda each: each if isinstance(each, str) and "_" in each[:5] else "",
)
def test_nothing_is_taken_from_a_site_that_is_not_alone_with_its_name(
    states: tuple[SiteState, ...], event: str, reason: str
) -> None:
    run(_refuses(*states, event=event, reason=reason))
