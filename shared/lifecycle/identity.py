"""Checks, before a process serves, that no other process uses its id.

Two processes with one id would both execute every command to it. Random names of each start never
meet one; a fixed name does after a copied environment file, or a restart before the old process has
gone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import structlog

from shared.clock import MonotonicClock
from shared.config import ProcessConfig
from shared.errors import NameInUse, NoResponders, RequestTimeout
from shared.messages import Alive, ReportAlive, Role
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import region_classes
from shared.subjects import alive
from shared.transport.bus import Bus, NatsBus, NatsRejected

log = structlog.get_logger(__name__)

REPLY_TIMEOUT_S = 1.0
# A server drops the connection of a process that hangs, or of a lost host, within about 3 s.
NUM_TRIES = 5


async def check_name(bus: Bus, role: Role) -> None:
    """Raises NameInUse if another process serves the id of this bus in `role`."""
    for _ in range(NUM_TRIES):
        try:
            other = await bus.request(
                alive(role, bus.process_id), ReportAlive(), Alive, timeout_s=REPLY_TIMEOUT_S
            )
        except NoResponders:
            return
        except RequestTimeout:
            continue
        raise name_in_use(bus.process_id, other.host, other.uptime_s)
    raise NameInUse(f"another process uses the name {bus.process_id} and does not answer")


async def connect(config: ProcessConfig, role: Role) -> NatsBus:
    """Connects as the process of `config`, which ends once the connection is lost for good. Raises
    NameInUse if it is not alone, and the errors of `NatsBus.connect`.
    """
    bus = await NatsBus.connect(
        config.nats_url,
        process_id=config.process_id,
        tls=config.nats_tls,
        tls_first=config.is_nats_tls_first,
        regions=RegionCheck(config.region, region_classes(config.region_classes)),
        url_file=_url_file(config),
    )
    try:
        await check_name(bus, role)
    except BaseException:
        await bus.close()
        raise
    bus.end_process_when_lost(MonotonicClock())
    return bus


async def connect_to_clients(config: ProcessConfig) -> NatsBus:
    """Returns a gateway's connection to the API clients, apart from that to the processes: what
    clients send does not delay tokens, heartbeats or commands. Raises the errors of
    `NatsBus.connect`.
    """
    connect = partial(
        NatsBus.connect,
        config.nats_url,
        process_id=config.process_id,
        tls=config.nats_tls,
        tls_first=config.is_nats_tls_first,
        url_file=_url_file(config),
    )
    try:
        bus = await connect(to_clients=True)
    except NatsRejected:  # a server whose configuration has one account for all rejects it
        log.warning("no_account_of_clients", remedy="write it again: hearth nats-config")
        bus = await connect()
    bus.end_process_when_lost(MonotonicClock())
    return bus


def _url_file(config: ProcessConfig) -> Path | None:
    file = config.option_files.get("nats_url")
    return None if file is None else file.path


def name_in_use(process_id: str, host: str, uptime_s: float) -> NameInUse:
    return NameInUse(
        f"another process on {host}, up for {uptime_s:.0f} s, uses the name {process_id}: "
        "stop it, or give this one a name of its own"
    )
