"""The requests of one response, which open in order, a limited number at once.

A scheduler queues 1,024 requests, and each open one takes a task and messages: a response of 1,000
prompts, or many such responses of a tenant, would leave no capacity to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from services.gateway.streams.receiver import Receiver
from shared.messages import Request

MAX_OPEN = 256  # requests of a response: as many as a worker runs at once
MAX_TENANT_OPEN = 2 * MAX_OPEN


@dataclass(frozen=True, slots=True)
class Opening:
    """A request to open. `is_queueable` says whether it may wait for a worker."""

    request: Request
    receiver: Receiver
    affinity_key: str = ""
    is_queueable: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id


class TenantOpenings:
    """The responses of one tenant. At most MAX_TENANT_OPEN of their requests are open, besides one
    of each further response. When one ends, the response with the fewest open requests opens the
    next; among equals, the one that arrived first.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.waiting: dict[QueuedOpenings, None] = {}  # responses with unopened requests, in order

    def num_at_once(self, most: int) -> int:
        """Returns how many requests of a new response may open. `most` is the gateway's free
        capacity.
        """
        return max(1, min(most, MAX_OPEN, MAX_TENANT_OPEN - self.num_open))

    def next_after(self, ended: QueuedOpenings) -> QueuedOpenings | None:
        """Returns the response whose next request opens after one of `ended` has ended, or None."""
        if ended in self.waiting and not ended.num_open:
            return ended
        if self.num_open >= MAX_TENANT_OPEN:
            return None
        fewest = min(self.waiting, key=lambda each: each.num_open, default=None)
        return fewest if fewest is not None and fewest.num_open < MAX_OPEN else None


class QueuedOpenings:
    """The requests of one response that are not open yet. Their deadlines count from `now`.
    `num_open` counts the open ones. `has_output` is true once a worker has sent output of any of
    them: the client may then have a part of the response.
    """

    def __init__(self, openings: Iterable[Opening], now: float, tenant: TenantOpenings) -> None:
        self.tenant = tenant
        self.num_open = 0
        self.has_output = False
        self._began_at = now
        self._waiting = {each.request_id: each for each in openings}
        tenant.waiting[self] = None
        self._note_left()

    def take_next(self, now: float) -> Opening | None:
        """Returns the next request, or None. It counts as open until `ended` is called."""
        for each in self._waiting.values():
            self.take(each.request_id)
            self._count(1)
            left_s = max(0.0, each.request.deadline_s - (now - self._began_at))
            request = msgspec.structs.replace(each.request, deadline_s=left_s)
            return Opening(request, each.receiver, each.affinity_key, each.is_queueable)
        return None

    def ended(self) -> None:
        self._count(-1)

    def change(self, applied: Callable[[Request], Request]) -> None:
        """Changes the requests that are not open yet."""
        self._waiting = {
            request_id: replace(each, request=applied(each.request))
            for request_id, each in self._waiting.items()
        }

    def take(self, request_id: str) -> Opening:
        opening = self._waiting.pop(request_id)
        self._note_left()
        return opening

    def take_all(self) -> list[Opening]:
        waiting, self._waiting = self._waiting, {}
        self._note_left()
        return list(waiting.values())

    def _count(self, change: int) -> None:
        self.num_open += change
        self.tenant.num_open += change

    def _note_left(self) -> None:
        if not self._waiting:
            self.tenant.waiting.pop(self, None)
