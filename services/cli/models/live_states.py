"""The states of models on hosts, from the hosts that a gateway knows, or heartbeats."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.cli.fleet.gateway_reads import read_fleet, read_models
from services.cli.nats_address import find_nats
from services.local.credentials import process_id_for
from shared.background import Background
from shared.clock import MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable
from shared.fleet.fleet_view import FleetView
from shared.fleet.host_view import ModelView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.telemetry.log import configure_logging
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

CONNECT_TIMEOUT_S = 1.0
LISTEN_S = 4 * HEARTBEAT_INTERVAL_S  # two of each host, and its list between them


def live_models(redis_url: str | None, nats_url: str | None) -> list[ModelView]:
    """Returns the models of live hosts. There are none if no heartbeat of a host can be read, or
    for the Redis of an unknown cluster.
    """
    if redis_url is not None and nats_url is None:
        return []
    try:
        return asyncio.run(_live_models(find_nats(nats_url)))
    except (ConfigError, DependencyUnavailable):
        return []


async def _live_models(nats_url: str) -> list[ModelView]:
    async with connected(nats_url, "observer", CONNECT_TIMEOUT_S) as bus:
        return await observed_models(bus)


@asynccontextmanager
async def connected(nats_url: str, role: str, timeout_s: float) -> AsyncIterator[Bus]:
    """Yields a connection to NATS. Raises DependencyUnavailable if no server accepts
    the connection.
    """
    configure_logging("model", level="error")
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for(role, nats_url),
        timeout_s=timeout_s,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        yield bus
    finally:
        await bus.close()


async def observed_models(bus: Bus) -> list[ModelView]:
    """Returns the models of the hosts that a gateway knows; without its answer, of all hosts that
    send a heartbeat within LISTEN_S.
    """
    read = await read_fleet(bus)
    if read is not None:
        return await read_models(bus, read.hosts)
    clock, view, background = MonotonicClock(), FleetView(), Background()
    received = ReceivedModels(bus, clock, background)

    def observe(heartbeat: Heartbeat) -> None:
        view.observe(received.complete(heartbeat), clock.now())

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, observe)
    await clock.sleep(LISTEN_S)
    await leave()
    await background.stop()
    return view.models()
