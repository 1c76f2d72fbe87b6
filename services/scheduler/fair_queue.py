"""A queue that is fair in tokens: start-time fair queueing, by priority class, then by tenant.

Each class and, within it, each tenant has a virtual time that grows by num_tokens / weight when one
of its requests is taken; the least virtual time goes next. A class weighs 4 times the class below,
so a higher class is served sooner and no class starves; a class that waits without being served
catches up, and is next after AGEING_S. (All its requests age together: if old requests moved up one
by one, one tenant's backlog would overtake the other tenants of its class.) A class or tenant that
was idle restarts at the present virtual time: idling earns no credit. Within a tenant the earliest
deadline goes first; ties go in order of arrival.
(Goyal et al., "Start-time Fair Queueing", 1996; Sheng et al., "Fairness in Serving Large Language
Models", 2024.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

CLASS_WEIGHT = 4.0
MAX_PRIORITY = 4
AGEING_S = 5.0  # longest wait of a class for its next request to be taken
MAX_FLOWS = 1024
SLACK = 64  # outdated entries that a heap may hold beyond its number of valid entries


class Queueable(Protocol):
    """A request of the queue. `queue_id` is its tenant, or the site that it came from.
    `sequence_number` is its position in the order of arrival.
    """

    @property
    def queue_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sequence_number(self) -> int: ...
    @property
    def deadline_at(self) -> float: ...


Q = TypeVar("Q", bound=Queueable)
Rank = tuple[float, float, int]  # a tenant's virtual time; its first request's deadline and number


@dataclass(slots=True)
class _Flow(Generic[Q]):
    """One tenant's requests of one class."""

    virtual: float
    order: list[tuple[float, int]] = field(default_factory=list)  # a heap; some are removed
    waiting: dict[int, Q] = field(default_factory=dict)

    def add(self, request: Q) -> None:
        heapq.heappush(self.order, (request.deadline_at, request.sequence_number))
        self.waiting[request.sequence_number] = request
        if len(self.order) > 2 * len(self.waiting) + SLACK:
            self.order = [each for each in self.order if each[1] in self.waiting]
            heapq.heapify(self.order)

    def rank(self) -> Rank:
        while self.order[0][1] not in self.waiting:
            heapq.heappop(self.order)
        return self.virtual, *self.order[0]

    def take(self) -> Q:
        _, _, sequence_number = self.rank()
        heapq.heappop(self.order)
        return self.waiting.pop(sequence_number)


@dataclass(slots=True)
class _Class(Generic[Q]):
    level: int
    virtual: float = 0.0
    present: float = 0.0  # virtual time of the tenant that was served last
    flows: dict[str, _Flow[Q]] = field(default_factory=dict)
    ranking: list[tuple[Rank, str]] = field(default_factory=list)  # a heap; some are outdated
    num_waiting: int = 0
    waits_since: float = 0.0  # when it was served last, or became non-empty

    def due(self, present: float, now: float) -> float:
        """Returns the virtual time after ageing: waiting shrinks its distance to the present to
        0.
        """
        patience = max(0.0, 1.0 - (now - self.waits_since) / AGEING_S)
        return min(self.virtual, present + (self.virtual - present) * patience)

    @property
    def weight(self) -> float:
        return CLASS_WEIGHT**self.level

    def add(self, request: Q, *, is_back: bool) -> None:
        flow = self.flows.get(request.queue_id)
        if flow is None:
            flow = self.flows[request.queue_id] = _Flow(self.present)
        elif not flow.waiting and not is_back:
            flow.virtual = max(flow.virtual, self.present)
        flow.add(request)
        self.num_waiting += 1
        self.rank(request.queue_id, flow)

    def take(self, now: float) -> Q:
        """Takes the first request of the first tenant and charges that tenant for it."""
        tenant_id, flow = self._first()
        request = flow.take()
        self.num_waiting -= 1
        self.waits_since = now
        self.present = flow.virtual
        self.charge(request, 1)
        if flow.waiting:
            self.rank(tenant_id, flow)
        if len(self.flows) > MAX_FLOWS:
            self._forget_idle_flows()
        return request

    def discard(self, request: Q) -> None:
        flow = self.flows.get(request.queue_id)
        if flow is None or flow.waiting.pop(request.sequence_number, None) is None:
            return
        self.num_waiting -= 1
        if flow.waiting:
            self.rank(request.queue_id, flow)

    def charge(self, request: Q, sign: int) -> None:
        self.virtual += sign * request.num_tokens / self.weight
        flow = self.flows.get(request.queue_id)
        if flow is not None:
            flow.virtual += sign * request.num_tokens / request.weight

    def rank(self, tenant_id: str, flow: _Flow[Q]) -> None:
        heapq.heappush(self.ranking, (flow.rank(), tenant_id))
        if len(self.ranking) > 2 * len(self.flows) + SLACK:
            active = ((name, flow) for name, flow in self.flows.items() if flow.waiting)
            self.ranking = [(flow.rank(), name) for name, flow in active]
            heapq.heapify(self.ranking)

    def _first(self) -> tuple[str, _Flow[Q]]:
        while True:
            rank, tenant_id = self.ranking[0]
            flow = self.flows.get(tenant_id)
            if flow is not None and flow.waiting and flow.rank() == rank:
                return tenant_id, flow
            heapq.heappop(self.ranking)

    def _forget_idle_flows(self) -> None:
        """Bounds the memory for idle tenants; each loses the charge of at most its last request."""
        self.flows = {name: flow for name, flow in self.flows.items() if flow.waiting}


def class_of(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class FairQueue(Generic[Q]):
    def __init__(self) -> None:
        self._classes: dict[int, _Class[Q]] = {}
        self._present = 0.0  # virtual time of the class that was served last
        # State before the last `pop`: the sequence number of its request, `_present`,
        # `waits_since`.
        self._before_pop = (-1, 0.0, 0.0)

    def __len__(self) -> int:
        return sum(each.num_waiting for each in self._classes.values())

    def push(self, request: Q, now: float) -> None:
        queue_class = self._class_of(request, now)
        if not queue_class.num_waiting:
            queue_class.virtual = max(queue_class.virtual, self._present)
        queue_class.add(request, is_back=False)

    def push_back(self, request: Q, now: float) -> None:
        """Undoes `pop`: restores the request's position and refunds its tokens. Directly after
        `pop`, also restores the waiting time of the class.
        """
        queue_class = self._class_of(request, now)
        queue_class.charge(request, -1)
        queue_class.add(request, is_back=True)
        if self._before_pop[0] == request.sequence_number:
            _, self._present, queue_class.waits_since = self._before_pop

    def pop(self, now: float) -> Q | None:
        waiting = [each for each in self._classes.values() if each.num_waiting]
        if not waiting:
            return None
        first = min(waiting, key=lambda each: (each.due(self._present, now), -each.level))
        present, waits_since = self._present, first.waits_since
        self._present = max(present, first.due(present, now))
        request = first.take(now)
        self._before_pop = (request.sequence_number, present, waits_since)
        return request

    def discard(self, request: Q) -> None:
        """Removes a waiting request from any position; its tenant is not charged."""
        queue_class = self._classes.get(class_of(request.priority))
        if queue_class is not None:
            queue_class.discard(request)

    def _class_of(self, request: Q, now: float) -> _Class[Q]:
        level = class_of(request.priority)
        queue_class = self._classes.get(level)
        if queue_class is None:
            queue_class = self._classes[level] = _Class(level)
        if not queue_class.num_waiting:
            queue_class.waits_since = now
        return queue_class
