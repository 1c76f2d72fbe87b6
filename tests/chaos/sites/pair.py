"""Two sites of real processes on this machine, linked through a relay that cuts and holds.

    clients ──▶ a: gateway-2, model `far` ──link──▶ b: gateway-1, gateway-2 ──▶ worker-1, worker-2
                a: gateway-1, worker-1, model `hearth-demo`: its own requests

Site a has no worker of `far`, or a small one. Site b connects to site a.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.messages import SiteState
from shared.subjects import STATES_OF_SITES
from shared.transport.bus import NatsBus
from shared.transport.link_config import SiteLink, SiteLinks
from shared.transport.nkeys import UserKey
from tests.chaos.checks.monitor import Monitor, is_empty
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.relay import LinkRelay
from tests.support.servers import free_port

Home = Literal["without the model", "without room"]

HOMES: tuple[Home, ...] = ("without the model", "without room")
FAR = "far"  # the model that site b serves for site a
ONE_WAY_S, BYTES_PER_S = 0.05, 125e6  # a round trip of 100 ms, and 1 Gb/s
BLOCK_BYTES = 256  # of the timing engine
NUM_BLOCKS, NUM_HOME_BLOCKS = 4096, 160
# All streams come back at once: in small batches their prompts alone would take seconds.
MAX_BATCH_TOKENS = "8192"
SERVICES_A = ("kv_index-1", "scheduler-1", "worker-1", "gateway-1", "gateway-2")
SMALL_WORKER = "worker-2"
SERVICES_B = ("kv_index-1", "scheduler-1", "worker-1", "worker-2", "gateway-1", "gateway-2")
IS_FAR: Mapping[str, str] = {"model-name": FAR}


@dataclass
class Site:
    """One site, and what its bus shows: heartbeats, and when each state of the other one came."""

    cluster: ChaosCluster
    monitor: Monitor = field(default_factory=Monitor)
    states_at: list[tuple[float, SiteState]] = field(default_factory=list)
    _bus: NatsBus | None = None

    @property
    def name(self) -> str:
        assert self.cluster.links is not None
        return self.cluster.links.site

    async def watch(self) -> None:
        """Reconnects, too, after its server was away."""
        await self.monitor.start(self.cluster)
        self._bus = await NatsBus.connect(self.cluster.nats_url, process_id="monitor")
        await self._bus.subscribe(STATES_OF_SITES, SiteState, self._take_state)

    async def stop_watching(self) -> None:
        await self.monitor.stop()
        if self._bus is not None:
            await self._bus.close()

    def _take_state(self, state: SiteState) -> None:
        self.states_at.append((asyncio.get_running_loop().time(), state))

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Until every worker is idle with all blocks. Raises NotReached."""
        newest, names = self.monitor.newest, self.cluster.named("worker")
        newest.clear()
        await self.monitor.wait(
            lambda: all(name in newest and is_empty(newest[name]) for name in names),
            timeout_s=timeout_s,
        )


@dataclass
class SitePair:
    a: Site
    b: Site
    link: LinkRelay

    @property
    def sites(self) -> tuple[Site, Site]:
        return self.a, self.b


@contextlib.asynccontextmanager
async def running_pair(
    folder: Path, home: Home, *, step_s: float, one_way_s: float = ONE_WAY_S
) -> AsyncIterator[SitePair]:
    key, leaf_port = UserKey.create(), free_port()
    link = LinkRelay(leaf_port, latency_s=one_way_s, bytes_per_s=BYTES_PER_S)
    listens = SiteLink(peer="b", key=key.public)
    connects = SiteLink(peer="a", address=f"127.0.0.1:{link.port}", seed=key.seed)
    has_small = home == "without room"
    pair = SitePair(
        _site(
            folder / "a",
            SiteLinks(site="a", links=(listens,), port=leaf_port),
            [*SERVICES_A, *((SMALL_WORKER,) if has_small else ())],
            far=("gateway-2", SMALL_WORKER),
            step_s=step_s,
        ),
        _site(
            folder / "b",
            SiteLinks(site="b", links=(connects,), port=free_port()),
            SERVICES_B,
            far=SERVICES_B[2:],
            step_s=step_s,
        ),
        link,
    )
    try:
        await asyncio.gather(*(each.cluster.start() for each in pair.sites))
        for each in pair.sites:
            await each.watch()
        yield pair
        for each in pair.sites:
            await each.stop_watching()
    finally:
        for each in pair.sites:
            each.cluster.stop()
        link.close()


def _site(
    folder: Path, links: SiteLinks, services: Iterable[str], *, far: Iterable[str], step_s: float
) -> Site:
    """`far` are the processes of the other model."""
    folder.mkdir()
    options: dict[str, Mapping[str, str]] = dict.fromkeys(far, IS_FAR)
    if links.site == "a":
        small = {"kv-cache-bytes": str(NUM_HOME_BLOCKS * BLOCK_BYTES)}
        options[SMALL_WORKER] = {**IS_FAR, **small}
    cluster = ChaosCluster(
        folder,
        step_s=step_s,
        worker_options={
            "kv-cache-bytes": str(NUM_BLOCKS * BLOCK_BYTES),
            "max-batch-tokens": MAX_BATCH_TOKENS,
        },
        services=services,
        options_of=options,
        links=links,
    )
    return Site(cluster)
