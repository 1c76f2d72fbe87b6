"""Bugs of schedulers and hosts that the variant `models` must find; see `planted.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from services.host import device_models
from services.host.budget import Room
from services.scheduler.residency import demand_policy
from services.scheduler.residency.keeper import ResidencyKeeper
from services.scheduler.residency.wake_orders import Orders


class HostedBug(NamedTuple):
    """The fields of a `Bug`."""

    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    found_by: int


def _always(value: object) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **kwargs: value


def _late_at_once(right: Any) -> Any:
    """Every wake under way is taken for one that ends after the deadline."""

    def error(self: ResidencyKeeper, ticket: Any, now: float) -> Any:
        deadline_at, ticket.deadline_at = ticket.deadline_at, now
        try:
            return right(self, ticket, now)
        finally:
            ticket.deadline_at = deadline_at

    return error


HOSTED_BUGS = (
    HostedBug("requests do not wait for hosts", ResidencyKeeper, "can_serve", _always(False), 2),
    HostedBug("a wake may take forever", Orders, "expire", _always(None), 22),
    HostedBug("nothing is parked for others", demand_policy, "chosen_victims", _always([]), 13),
    HostedBug("every wake is called late", ResidencyKeeper, "error", _late_at_once, 0),
    HostedBug("a host forgets its budget", device_models, "room_for", _always(Room()), 13),
)
