"""Queues whose next request has found no room, and which of them may try it again. No I/O.

open ──block──▶ blocked ──allow_probe──▶ probing ──take──▶ blocked
                   └──────────── unblock: a start succeeded, or nobody waits ─────────▶ open
"""

from __future__ import annotations

from collections.abc import Set

from services.scheduler.backlog import QueueKey, model_key
from services.scheduler.placement import RequestSize
from shared.messages import Heartbeat


class BlockedQueues:
    def __init__(self) -> None:
        self._smallest: dict[QueueKey, RequestSize] = {}  # smallest request without room, by queue
        self._probing: set[QueueKey] = set()  # may try one request: its success unblocks the queue

    def __contains__(self, queue: QueueKey) -> bool:
        return queue in self._smallest

    def all(self) -> list[QueueKey]:
        return list(self._smallest)

    def closed(self) -> Set[QueueKey]:
        """Returns the queues whose requests must wait."""
        return self._smallest.keys() - self._probing

    def block(self, queue: QueueKey, needs: RequestSize) -> None:
        smallest = self._smallest.get(queue, needs)
        self._smallest[queue] = min(smallest, needs, key=lambda each: each.num_tokens)

    def unblock(self, queue: QueueKey) -> bool:
        """Returns whether the queue was blocked."""
        self._probing.discard(queue)
        return self._smallest.pop(queue, None) is not None

    def allow_probe(self, queue: QueueKey) -> bool:
        """Returns False for a queue that is open."""
        if queue not in self._smallest:
            return False
        self._probing.add(queue)
        return True

    def take(self, queue: QueueKey) -> None:
        """Records a request that is taken from its queue: a probe is one request."""
        self._probing.discard(queue)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Allows a probe of the queues for which the worker reports room."""
        card, load = heartbeat.model, heartbeat.load
        if card is None or load is None:
            return
        served, features = model_key(card), frozenset(card.features)
        for queue, needs in self._smallest.items():
            if queue.served != served or not frozenset(queue.needs) <= features:
                continue
            has_room = needs.num_blocks(card.block_size) <= load.num_free_blocks
            if has_room or "decode" not in heartbeat.roles:
                self._probing.add(queue)
