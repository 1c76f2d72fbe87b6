"""Asks a gateway for the state of a fleet, which nobody needs to wait for then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shared.errors import HearthError
from shared.fleet.host_view import HostView, ModelView, in_order, model_views
from shared.fleet.read_fleet import FleetRead, ReadFleet
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, Loss
from shared.lifecycle.host_models import read_host_models
from shared.subjects import READ_FLEET, fleet
from shared.transport.bus import Bus

ANY_TIMEOUT_S = 1.2 * HEARTBEAT_INTERVAL_S  # as heartbeats would show the gateways by then
REPLY_TIMEOUT_S = 1.0
MAX_ASKED = 3  # gateways
_LOST_STATES = {each.value for each in Loss}


async def read_fleet(bus: Bus) -> FleetRead | None:
    """Returns the state of the fleet from the gateway that has run longest, of the one that answers
    first and those that it knows. Returns None if none answers soon, or if that one has just
    started: it may not have received all heartbeats.
    """
    first = await _ask(bus, READ_FLEET, ANY_TIMEOUT_S)
    if first is None or first.uptime_s < SILENCE_LIMIT_S:
        return None
    others = [each for each in live_gateways(first) if each != first.gateway_id]
    replies = await ask_gateways(bus, others[:MAX_ASKED])
    return max((first, *replies), key=lambda each: each.uptime_s)


def live_gateways(read: FleetRead) -> list[str]:
    known = (each for each in read.processes if each.role == "gateway" and not each.is_lost)
    return sorted({read.gateway_id, *(each.process_id for each in known)})


async def ask_gateways(bus: Bus, gateway_ids: Iterable[str]) -> list[FleetRead]:
    """Returns the replies, in the order of the ids."""
    asked = (_ask(bus, fleet(each), REPLY_TIMEOUT_S) for each in gateway_ids)
    return [each for each in await asyncio.gather(*asked) if each is not None]


async def _ask(bus: Bus, subject: str, timeout_s: float) -> FleetRead | None:
    try:
        return await bus.request(subject, ReadFleet(), FleetRead, timeout_s=timeout_s)
    except HearthError:
        return None


async def read_models(bus: Bus, hosts: Iterable[HostView]) -> list[ModelView]:
    """Returns the models of the hosts that answer."""
    live = [each for each in hosts if each.state not in _LOST_STATES]
    found = await asyncio.gather(*(_models_of(bus, each) for each in live))
    return in_order(model for each in found for model in each)


async def _models_of(bus: Bus, host: HostView) -> list[ModelView]:
    try:
        _, models = await read_host_models(bus, host.process_id)
    except HearthError:
        return []
    return list(model_views(host, models))
