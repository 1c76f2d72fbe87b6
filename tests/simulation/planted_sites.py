"""Bugs of links between sites that schedules of linked sites must find; see `planted.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import structs

from services.gateway.sites.site_placements import SitePlacements
from services.gateway.streams.streams import Streams
from services.scheduler.candidates import Candidates


class SiteBug(NamedTuple):
    """The fields of a `Bug`."""

    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    found_by: int


def _always(value: object) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **kwargs: value


def _from_zero(right: Any) -> Any:
    """The tokens that a request has are not counted where it continues."""

    def opened(self: SitePlacements, command: Any, request: Any, *args: Any, **named: Any) -> Any:
        choices = tuple(structs.replace(each, output_token_ids=b"") for each in request.choices)
        return right(self, command, structs.replace(request, choices=choices), *args, **named)

    return opened


def _late_tokens_accepted(right: Any) -> Any:
    """Takes the tokens of placements that the request has left."""
    owners: dict[tuple[Streams, bytes], Any] = {}

    def on_token_batch(self: Streams, batch: Any, now: float) -> None:
        for entry in batch.entries:
            stream = self._by_placement.get(entry.placement_id)
            if stream is None:
                stream = owners.get((self, entry.placement_id))
                if stream is not None and stream.placement is not None:
                    self._accept(stream, entry, now)
            else:
                owners[self, entry.placement_id] = stream
        right(self, batch, now)

    return on_token_batch


SITE_BUGS = (
    SiteBug("no orphan of a link is swept", SitePlacements, "overdue", _always([]), 73),
    SiteBug("a link counts tokens from zero", SitePlacements, "open", _from_zero, 25),
    SiteBug("late tokens of a link count", Streams, "on_token_batch", _late_tokens_accepted, 144),
    SiteBug("a site that refuses keeps it", Candidates, "is_left_to_sites", _always(False), 4953),
)
