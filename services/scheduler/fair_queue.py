"""A queue that is fair in tokens: start-time fair queueing, by priority class, then by tenant.

Each class and, within it, each tenant has a virtual time that grows by num_tokens / weight when one
of its requests is taken; the least goes next. A class weighs 4 times the class below, so a higher
one is served sooner and no class starves; and who has waited AGEING_S goes up a class, again and
again. Who comes back from idleness starts at the present virtual time: idling earns no credit.
Within a tenant the earliest deadline goes first, of equal ones the first to arrive.
(Goyal et al., "Start-time Fair Queueing", 1996; Sheng et al., "Fairness in Serving Large Language
Models", 2024.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

CLASS_WEIGHT = 4.0
MAX_PRIORITY = 4
AGEING_S = 5.0  # in one class, before the next higher
MAX_FLOWS = 1024
SLACK = 64  # outdated entries that a heap may hold beyond as many as it has valid ones


class Queueable(Protocol):
    """`sequence_number` is its place in the order of arrival; unique."""

    @property
    def tenant_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sequence_number(self) -> int: ...
    @property
    def queued_at(self) -> float: ...
    @property
    def deadline_at(self) -> float: ...


Q = TypeVar("Q", bound=Queueable)
Rank = tuple[float, float, int]  # of a tenant: virtual time, then its head's deadline and number


@dataclass(slots=True)
class _Flow(Generic[Q]):
    """One tenant's requests of one class."""

    virtual: float
    order: list[tuple[float, int]] = field(default_factory=list)  # a heap; some have left
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

    @property
    def weight(self) -> float:
        return CLASS_WEIGHT**self.level

    def add(self, request: Q, *, is_back: bool) -> None:
        flow = self.flows.get(request.tenant_id)
        if flow is None:
            flow = self.flows[request.tenant_id] = _Flow(self.present)
        elif not flow.waiting and not is_back:
            flow.virtual = max(flow.virtual, self.present)
        flow.add(request)
        self.num_waiting += 1
        self.rank(request.tenant_id, flow)

    def take(self) -> Q:
        """The first request of the first tenant, which pays for it."""
        tenant_id, flow = self._first()
        request = flow.take()
        self.num_waiting -= 1
        self.present = flow.virtual
        self.charge(request, 1)
        if flow.waiting:
            self.rank(tenant_id, flow)
        if len(self.flows) > MAX_FLOWS:
            self._forget_idle_flows()
        return request

    def discard(self, request: Q) -> None:
        flow = self.flows[request.tenant_id]
        del flow.waiting[request.sequence_number]
        self.num_waiting -= 1
        if flow.waiting:
            self.rank(request.tenant_id, flow)

    def charge(self, request: Q, sign: int) -> None:
        self.virtual += sign * request.num_tokens / self.weight
        flow = self.flows.get(request.tenant_id)
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
        """Bounds the memory for tenants that come once; each forgives at most its last request."""
        self.flows = {name: flow for name, flow in self.flows.items() if flow.waiting}


def class_of(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class FairQueue(Generic[Q]):
    def __init__(self) -> None:
        self._classes: dict[int, _Class[Q]] = {}
        self._level_of: dict[int, int] = {}  # of each that waits, by its number
        self._ageing: list[tuple[float, int, Q]] = []  # a heap: who goes up when
        self._present = 0.0  # virtual time of the class that was served last

    def __len__(self) -> int:
        return len(self._level_of)

    def push(self, request: Q, now: float) -> None:
        self._enter(request, _level(request, now))

    def push_back(self, request: Q, now: float) -> None:
        """Undoes `pop`: the request gets its old place and its tokens are not counted."""
        level = _level(request, now)
        if level in self._classes:
            self._classes[level].charge(request, -1)
        self._enter(request, level, is_back=True)

    def pop(self, now: float) -> Q | None:
        self._promote(now)
        waiting = [each for each in self._classes.values() if each.num_waiting]
        if not waiting:
            return None
        first = min(waiting, key=lambda each: (each.virtual, -each.level))
        self._present = first.virtual
        request = first.take()
        del self._level_of[request.sequence_number]
        return request

    def discard(self, request: Q) -> None:
        """Takes a waiting request out wherever it stands; its tenant is not charged."""
        level = self._level_of.pop(request.sequence_number, None)
        if level is not None:
            self._classes[level].discard(request)

    def _enter(self, request: Q, level: int, *, is_back: bool = False) -> None:
        queue_class = self._classes.setdefault(level, _Class(level))
        if not queue_class.num_waiting and not is_back:
            queue_class.virtual = max(queue_class.virtual, self._present)
        queue_class.add(request, is_back=is_back)
        self._level_of[request.sequence_number] = level
        if level < MAX_PRIORITY:
            leaves_at = request.queued_at + (level + 1 - class_of(request.priority)) * AGEING_S
            heapq.heappush(self._ageing, (leaves_at, request.sequence_number, request))
            self._forget_left()

    def _promote(self, now: float) -> None:
        while self._ageing and self._ageing[0][0] <= now:
            leaves_at, sequence_number, request = heapq.heappop(self._ageing)
            level = self._level_of.get(sequence_number)
            if level is not None and level < _level(request, leaves_at + AGEING_S / 2):
                self.discard(request)
                self._enter(request, level + 1)

    def _forget_left(self) -> None:
        if len(self._ageing) > 2 * len(self._level_of) + SLACK:
            self._ageing = [each for each in self._ageing if each[1] in self._level_of]
            heapq.heapify(self._ageing)


def _level(request: Queueable, now: float) -> int:
    num_steps = int(max(0.0, now - request.queued_at) // AGEING_S)
    return class_of(class_of(request.priority) + num_steps)
