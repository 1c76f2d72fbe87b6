"""A gateway of a simulated site: streams, health and links, without HTTP and tenants."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.sites.site_service import SiteService
from services.gateway.streams.actions import Report
from services.gateway.streams.stream_driver import StreamDriver
from shared.config import GatewayConfig
from shared.errors import NoCapacity
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.sites.linked_sites import LinkedSites
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness


class StreamGateway:
    """With `site` it serves requests of linked sites, and names `region` to them."""

    def __init__(
        self,
        network: SimulatedNetwork,
        gateway_id: str,
        *,
        seed: int,
        on_report: Callable[[Report], None] = lambda report: None,
        site: str = "",
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
    ) -> None:
        self.process = SimulatedProcess(gateway_id)
        clock, randomness = ProcessClock(self.process), SeededRandomness(seed)
        self.bus = network.bus(gateway_id, self.process, RegionCheck(region, classes))
        linked = LinkedSites(self.bus, clock, site)
        self.health_monitor = HealthMonitor(
            self.bus,
            clock,
            randomness,
            roles=("gateway",),
            region=region,
            loads=Loads(links=linked.loads),
        )
        self.driver = StreamDriver(self.bus, clock, self.health_monitor, on_report=on_report)
        self.config = config = GatewayConfig(
            nats_url="nats://here",
            redis_url="redis://here",
            process_id=gateway_id,
            site=site,
            region=region,
            region_classes=classes.texts(),
            cluster_secret=cluster_secret_of(site),
        )
        self.sites = SiteService(
            config,
            self.bus,
            clock,
            self.health_monitor,
            self.driver,
            linked,
            check_capacity=self.check_ready,
        )
        self._has_sites = bool(site)

    async def start(self) -> None:
        await self.driver.start()
        await self.join()

    async def join(self) -> None:
        await self.health_monitor.start()
        if self._has_sites:
            await self.sites.start()
        await self.health_monitor.transition_to("ready")

    def check_ready(self) -> None:
        if self.health_monitor.state != "ready":
            raise NoCapacity("the gateway is draining", retry_after_s=1.0)

    async def drain(self) -> None:
        await self.health_monitor.transition_to("draining")
        if self._has_sites:
            await self.sites.leave()
        await self.driver.idle()

    async def stop(self) -> None:
        await self.end_streams()
        await self.leave()

    async def end_streams(self) -> None:
        self.driver.close_all(NoCapacity("the gateway stops", retry_after_s=1.0))
        await self.driver.stop()
        await self.sites.stop()

    async def leave(self) -> None:
        await self.health_monitor.stop()
        await self.bus.close()


def cluster_secret_of(site: str) -> str:
    return f"secret of {site}"
