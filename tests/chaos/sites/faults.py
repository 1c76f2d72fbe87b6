"""What befalls a link or a site. Each function returns once the fault has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from tests.chaos.sites.pair import Site, SitePair
from tests.support.cluster.chaos_cluster import SERVERS

LINK_FAULT_S = 8.0  # longer than a site's placements outlive the silence of the other one
FROZEN_S = 6.0
FROZEN_SERVER_S = 4.0
RESTART_S = 0.5  # after which a supervisor restarts a process
NUM_FLAPS, UP_S, DOWN_S = 5, 2.5, 1.5
DRAIN_TIMEOUT_S = 40.0


async def cut(pair: SitePair) -> None:
    pair.link.cut()
    await _open_after(pair, LINK_FAULT_S)


async def flap(pair: SitePair) -> None:
    for _ in range(NUM_FLAPS):
        pair.link.cut()
        await _open_after(pair, DOWN_S)
        await asyncio.sleep(UP_S)


async def hold(pair: SitePair) -> None:
    pair.link.hold()
    await _open_after(pair, LINK_FAULT_S)


async def hold_to_a(pair: SitePair) -> None:
    """Site b connects to site a: what goes to the target goes there."""
    pair.link.hold(back=False)
    await _open_after(pair, LINK_FAULT_S)


async def hold_to_b(pair: SitePair) -> None:
    pair.link.hold(forth=False)
    await _open_after(pair, LINK_FAULT_S)


async def _open_after(pair: SitePair, seconds: float) -> None:
    await asyncio.sleep(seconds)
    pair.link.open()


def killed(site: str, *names: str) -> Callable[[SitePair], Awaitable[None]]:
    async def strike(pair: SitePair) -> None:
        cluster = _of(pair, site).cluster
        for name in names:
            cluster.kill(name)
        await asyncio.sleep(RESTART_S)
        for name in names:
            await cluster.restart(name)
        await cluster.wait_until_ready()

    return strike


def frozen(site: str, name: str, seconds: float) -> Callable[[SitePair], Awaitable[None]]:
    async def strike(pair: SitePair) -> None:
        cluster = _of(pair, site).cluster
        cluster.freeze(name)
        await asyncio.sleep(seconds)
        cluster.thaw(name)

    return strike


async def kill_site(pair: SitePair) -> None:
    await killed("b", *SERVERS, *pair.b.cluster.services)(pair)


async def drain_gateway(pair: SitePair) -> None:
    await _drain(pair.b, ["gateway-1"])
    await pair.b.cluster.wait_until_ready()


async def drain_site(pair: SitePair) -> None:
    """Its gateways end before what they use, as with `hearth stop`."""
    services = pair.b.cluster.services
    gateways = pair.b.cluster.named("gateway")
    await _drain(pair.b, gateways, restarts=False)
    await _drain(pair.b, [each for each in services if each not in gateways], restarts=False)
    for name in services:
        await pair.b.cluster.restart(name)
    await pair.b.cluster.wait_until_ready()


async def _drain(site: Site, names: Iterable[str], *, restarts: bool = True) -> None:
    for name in names:
        site.cluster.terminate(name)
    for name in names:
        assert await site.cluster.ended(name, DRAIN_TIMEOUT_S) == 0, name
        if restarts:
            await site.cluster.restart(name)


def _of(pair: SitePair, site: str) -> Site:
    return pair.a if site == "a" else pair.b


@dataclass(frozen=True)
class SiteFault:
    """`spares_own`: both sites serve their own requests meanwhile. `breaks`: the clients' gateway
    dies, so their connections end.
    """

    strike: Callable[[SitePair], Awaitable[None]]
    spares_own: bool = False
    breaks: bool = False


FAULTS: dict[str, SiteFault] = {
    "link cut": SiteFault(cut, spares_own=True),
    "link flaps": SiteFault(flap, spares_own=True),
    "link frozen": SiteFault(hold, spares_own=True),
    "link frozen to a": SiteFault(hold_to_a, spares_own=True),
    "link frozen to b": SiteFault(hold_to_b, spares_own=True),
    "b: gateway killed": SiteFault(killed("b", "gateway-1")),
    "b: gateway frozen": SiteFault(frozen("b", "gateway-1", FROZEN_S)),
    "b: gateway drained": SiteFault(drain_gateway),
    "a: scheduler killed": SiteFault(killed("a", "scheduler-1")),
    "a: gateway killed": SiteFault(killed("a", "gateway-2"), spares_own=True, breaks=True),
    "a: NATS killed": SiteFault(killed("a", "nats-server")),
    "a: NATS frozen": SiteFault(frozen("a", "nats-server", FROZEN_SERVER_S)),
    "b: NATS killed": SiteFault(killed("b", "nats-server")),
    "b: NATS frozen": SiteFault(frozen("b", "nats-server", FROZEN_SERVER_S)),
    "b: killed": SiteFault(kill_site),
    "b: drained": SiteFault(drain_site),
}
