"""Opens the gateway's end of the pixel plane, and decides which workers get pixels."""

from __future__ import annotations

from functools import partial
from typing import cast

from shared.config import GatewayConfig
from shared.errors import InvalidRequest
from shared.kv_wire.dialer import DataPlaneSecurity, Dialer
from shared.lifecycle.health import Fleet
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import FetchPixels
from shared.pixels.pixel_holder import PixelHolder, Regions
from shared.tenancy.refusals import Refusals
from shared.transport.bus import Bus

WORKERS = frozenset({"encode", "prefill", "decode"})


def open_pixel_holder(
    config: GatewayConfig, bus: Bus, health_monitor: HealthMonitor
) -> PixelHolder:
    security = cast(DataPlaneSecurity, config.data_plane_security)  # checked with the config
    return PixelHolder(
        bus,
        Dialer(security=security),
        partial(check_fetch, health_monitor.fleet, health_monitor.refusals),
        max_bytes=config.max_pixel_bytes,
        max_tenant_bytes=config.max_tenant_pixel_bytes,
    )


def check_fetch(fleet: Fleet, refusals: Refusals, command: FetchPixels, regions: Regions) -> None:
    """Raises InvalidRequest unless the asking process is a worker of this site, and OutsideRegions
    unless it is in the regions that may hold the pixels.
    """
    heartbeat = fleet.heartbeat_of(command.worker_id)
    if heartbeat is None or WORKERS.isdisjoint(heartbeat.roles):
        raise InvalidRequest(f"{command.worker_id} is no worker that this gateway knows")
    refusals.check("pixels", command.tenant_id, regions, heartbeat.region)
