"""Lanes whose next request has found no room, and which of them may try it again. No I/O.

open ──block──▶ blocked ──allow_probe──▶ probing ──take──▶ blocked
                   └──────────── unblock: a start succeeded, or nobody waits ─────────▶ open
"""

from __future__ import annotations

from collections.abc import Set

from services.scheduler.backlog import Lane, model_key
from services.scheduler.placement import RequestSize
from shared.messages import Heartbeat


class BlockedLanes:
    def __init__(self) -> None:
        self._smallest: dict[Lane, RequestSize] = {}  # of the requests without room, by lane
        self._probing: set[Lane] = set()  # may try one request: its success unblocks the lane

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._smallest

    def all(self) -> list[Lane]:
        return list(self._smallest)

    def closed(self) -> Set[Lane]:
        """Lanes whose requests must wait."""
        return self._smallest.keys() - self._probing

    def block(self, lane: Lane, needs: RequestSize) -> None:
        smallest = self._smallest.get(lane, needs)
        self._smallest[lane] = min(smallest, needs, key=lambda each: each.num_tokens)

    def unblock(self, lane: Lane) -> bool:
        """Returns whether the lane was blocked."""
        self._probing.discard(lane)
        return self._smallest.pop(lane, None) is not None

    def allow_probe(self, lane: Lane) -> bool:
        """Returns False for a lane that is open."""
        if lane not in self._smallest:
            return False
        self._probing.add(lane)
        return True

    def take(self, lane: Lane) -> None:
        """Call for each request that is taken from its lane: a probe is one request."""
        self._probing.discard(lane)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Allows a probe of the lanes for which the worker reports room."""
        card, load = heartbeat.model, heartbeat.load
        if card is None or load is None:
            return
        served, features = model_key(card), frozenset(card.features)
        for lane, needs in self._smallest.items():
            if lane.served != served or not frozenset(lane.needs) <= features:
                continue
            has_room = needs.num_blocks(card.block_size) <= load.num_free_blocks
            if has_room or "decode" not in heartbeat.roles:
                self._probing.add(lane)
