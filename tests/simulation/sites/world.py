"""Linked sites on virtual time: a fleet each, the links between them, and their faults."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from functools import lru_cache, partial
from typing import cast

import msgspec

from shared.messages import ModelCard, StartDecode
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import (
    CredentialRole,
    credential_of,
    permissions,
    sender_of,
    sent_by,
    without_class,
)
from tests.simulation.checks.excuses import Trouble
from tests.simulation.plan import Fault, Plan
from tests.simulation.sites.liar import LyingSite
from tests.simulation.sites.plan import LIAR, LinkFault, SitesPlan
from tests.simulation.world.fleet import JOIN_S, Fleet
from tests.support.world.bus import SimulatedNetwork, matches
from tests.support.world.links import Link, LinkedNetworks

RECONNECT_S = 1.0
NUM_FLAPS = 4
_decode_start = msgspec.msgpack.Decoder(StartDecode).decode


class LinkedFleets:
    classes: RegionClasses = NO_CLASSES

    def __init__(self, plan: SitesPlan) -> None:
        self.plan = plan
        self.fleets = {
            name: self.new_fleet(each, name, plan.regions[name])
            for name, each in plan.sites.items()
        }
        networks = {name: each.network for name, each in self.fleets.items()}
        if plan.lie is not None:
            networks[LIAR] = SimulatedNetwork(seed=plan.seed)
        self.regions = {**plan.regions, LIAR: next(iter(plan.regions.values()))}
        self.linked = LinkedNetworks(
            networks, self.regions, delay_s=plan.delay_s, classes=self.classes
        )
        self.linked.taps.append(self._check_arrival)
        self.wrongs: dict[str, None] = {}
        self.num_crossed = Counter[str]()  # requests, by the site that got them
        self.liar: LyingSite | None = None
        self._busy_links: dict[Link, asyncio.Lock] = defaultdict(asyncio.Lock)
        for name, fleet in self.fleets.items():
            fleet.on_given_up = self._given_up
            fleet.network.taps.append(partial(self._check_departure, name))

    def new_fleet(self, plan: Plan, site: str, region: str) -> Fleet:
        return Fleet(plan, site=site, region=region)

    async def start(self) -> None:
        for fleet in self.fleets.values():
            await fleet.start()
        if self.plan.lie is not None:
            region = self.regions[LIAR]
            network = self.linked.networks[LIAR]
            self.liar = LyingSite(network, self._card(), region, self.plan.lie)
            await self.liar.start()

    def _card(self) -> ModelCard:
        workers = (each for fleet in self.fleets.values() for each in fleet.workers())
        return next(workers).worker.served.card

    async def serve(self) -> None:
        await asyncio.gather(*(fleet.serve() for fleet in self.fleets.values()))

    async def stop(self) -> None:
        if self.liar is not None:
            await self.liar.stop()
        for fleet in self.fleets.values():
            await fleet.stop()

    @property
    def is_busy(self) -> bool:
        return any(
            fleet.is_replacing or any(client.is_open for client in fleet.clients)
            for fleet in self.fleets.values()
        )

    def supervise(self) -> None:
        for fleet in self.fleets.values():
            fleet.monitor.check_bounds(fleet.hosts())
            fleet.supervise()

    def leaks(self) -> list[str]:
        return [f"{name}: {each}" for name, fleet in self.fleets.items() for each in fleet.leaks()]

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    async def suffer(self) -> None:
        """Runs until the last fault has passed."""
        async with asyncio.TaskGroup() as group:
            for fleet in self.fleets.values():
                group.create_task(fleet.suffer())
            for fault in self.plan.faults:
                group.create_task(self._befall(fault))

    async def _befall(self, fault: LinkFault) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, JOIN_S + fault.at_s - loop.time()))
        link = self.linked.link(fault.first, fault.second)
        async with self._busy_links[link]:
            known = Fault(at_s=fault.at_s, kind="link_drop")
            troubles = [Trouble(known, loop.time()) for _ in self.fleets]
            for fleet, trouble in zip(self.fleets.values(), troubles, strict=True):
                fleet.troubles.append(trouble)
            await self._inflict(link, fault)
            for trouble in troubles:
                trouble.ended = loop.time()

    async def _inflict(self, link: Link, fault: LinkFault) -> None:
        there, back = (fault.first, fault.second), (fault.second, fault.first)
        match fault.kind:
            case "cut":
                await _cut(link, fault.duration_s)
            case "flap":
                for _ in range(NUM_FLAPS):
                    await _cut(link, fault.duration_s / NUM_FLAPS / 2)
                    await asyncio.sleep(fault.duration_s / NUM_FLAPS / 2)
            case "slow":
                directions = [link.direction(*each) for each in (there, back)]
                for each in directions:
                    each.delay_s = fault.delay_s
                await asyncio.sleep(fault.duration_s)
                for each in directions:
                    each.delay_s = self.plan.delay_s
            case "stall":
                await self._stall(link, fault, (there, back))
            case "one_way":
                await self._stall(link, fault, (there,))

    async def _stall(
        self, link: Link, fault: LinkFault, pairs: tuple[tuple[str, str], ...]
    ) -> None:
        for pair in pairs:
            link.stall(*pair)
        await asyncio.sleep(fault.duration_s)
        if fault.is_lost:
            link.cut()
        for pair in pairs:
            link.resume(*pair)
        if fault.is_lost:
            await asyncio.sleep(RECONNECT_S)
            link.restore()

    # ── checks while it runs ─────────────────────────────────────────────────────────────────────

    def _check_departure(self, site: str, sender: str, subject: str, data: bytes) -> None:
        """Every process may publish what it sends, as its server's permissions say. An index here
        has no region.
        """
        region = self.fleets[site].region_of(sender) if site in self.fleets else self.regions[site]
        if not sender.startswith("kv_index") and not _may_publish(
            sender, region, sent_by(subject, sender), self.classes.with_region(region)
        ):
            self.wrongs[f"{site}: {sender} may not publish {subject}"] = None

    def _check_arrival(self, site: str, subject: str, data: bytes) -> None:
        parts = without_class(subject).split(".")
        if not subject or (parts[4], parts[7]) != ("decode", "start"):
            return
        self.num_crossed[site] += 1
        request = _decode_start(data).request
        if request.allowed_regions and self.regions[site] not in request.allowed_regions:
            self.wrongs[f"{request.request_id} came to {site}, where it may not be served"] = None
        if request.origin_site:
            self.wrongs[f"{sender_of(subject)} passed on {request.request_id}"] = None

    def _given_up(self, placement_id: bytes) -> None:
        """What a given-up placement samples must not reach a client, wherever it runs."""
        for fleet in self.fleets.values():
            fleet.given_up(placement_id)
            for gateway in fleet.gateways():
                taken = gateway.sites._placements._placements.get(placement_id)
                stream = (
                    None if taken is None else gateway.streams._by_request.get(taken.request_id)
                )
                if stream is not None and stream.placement is not None:
                    fleet.given_up(stream.placement.placement_id)


async def _cut(link: Link, duration_s: float) -> None:
    link.cut()
    await asyncio.sleep(duration_s)
    link.restore()


@lru_cache(10_000)
def _may_publish(
    sender: str, region: str, wire_subject: str, classes: tuple[str, ...] = ()
) -> bool:
    role = cast(CredentialRole, sender.partition("-")[0])
    allowed = permissions(
        role, credential_of(sender), region, is_linked=True, region_classes=classes
    )
    return any(matches(each, wire_subject) for each in allowed.publish)
