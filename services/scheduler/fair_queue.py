"""A queue that is fair in tokens: start-time fair queueing, by priority class, then by tenant.

Each class and, within it, each tenant has a virtual time that grows by num_tokens / weight when one
of its requests is taken; the least goes next. A class weighs 4 times the class below, so a higher
one is served sooner and no class starves. Who comes back from idleness starts at the present
virtual time: idling earns no credit. Within a tenant the order is that of arrival.
(Goyal et al., "Start-time Fair Queueing", 1996; Sheng et al., "Fairness in Serving Large Language
Models", 2024.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

CLASS_WEIGHT = 4.0
MAX_PRIORITY = 4
MAX_FLOWS = 1024


class Queueable(Protocol):
    """`sequence_number` is its place in the order of arrival; unique."""

    @property
    def tenant_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sequence_number(self) -> int: ...


Q = TypeVar("Q", bound=Queueable)


@dataclass(slots=True)
class _Flow(Generic[Q]):
    """One tenant's requests of one class."""

    weight: float
    virtual: float
    order: list[int] = field(default_factory=list)  # a heap; discarded ones leave it lazily
    waiting: dict[int, Q] = field(default_factory=dict)

    def head(self) -> int:
        while self.order[0] not in self.waiting:
            heapq.heappop(self.order)
        return self.order[0]

    def take(self) -> Q:
        request = self.waiting.pop(self.head())
        heapq.heappop(self.order)
        return request


@dataclass(slots=True)
class _Class(Generic[Q]):
    priority: int
    weight: float
    virtual: float
    present: float = 0.0  # virtual time of the tenant that was served last
    flows: dict[str, _Flow[Q]] = field(default_factory=dict)
    num_waiting: int = 0

    def active_flows(self) -> Iterator[_Flow[Q]]:
        return (flow for flow in self.flows.values() if flow.waiting)

    def forget_idle_flows(self) -> None:
        """Bounds the memory for tenants that come once; each forgives at most its last request."""
        self.flows = {name: flow for name, flow in self.flows.items() if flow.waiting}


def class_of(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class FairQueue(Generic[Q]):
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants; 1 where none is given."""
        self._weights = weights or {}
        self._classes: dict[int, _Class[Q]] = {}
        self._present = 0.0  # virtual time of the class that was served last

    def __len__(self) -> int:
        return sum(each.num_waiting for each in self._classes.values())

    def push(self, request: Q) -> None:
        queue_class = self._class(request.priority)
        flow = self._flow(queue_class, request.tenant_id)
        if not queue_class.num_waiting:
            queue_class.virtual = max(queue_class.virtual, self._present)
        if not flow.waiting:
            flow.virtual = max(flow.virtual, queue_class.present)
        self._insert(queue_class, flow, request)

    def push_back(self, request: Q) -> None:
        """Undoes `pop`: the request gets its old place and its tokens are not counted."""
        queue_class = self._class(request.priority)
        is_forgotten = request.tenant_id not in queue_class.flows
        flow = self._flow(queue_class, request.tenant_id)
        queue_class.virtual -= request.num_tokens / queue_class.weight
        if not is_forgotten:
            flow.virtual -= request.num_tokens / flow.weight
        self._insert(queue_class, flow, request)

    def pop(self) -> Q | None:
        waiting = [each for each in self._classes.values() if each.num_waiting]
        if not waiting:
            return None
        queue_class = min(waiting, key=lambda each: (each.virtual, -each.priority))
        flow = min(queue_class.active_flows(), key=lambda each: (each.virtual, each.head()))
        request = flow.take()
        queue_class.num_waiting -= 1
        self._present, queue_class.present = queue_class.virtual, flow.virtual
        queue_class.virtual += request.num_tokens / queue_class.weight
        flow.virtual += request.num_tokens / flow.weight
        if len(queue_class.flows) > MAX_FLOWS:
            queue_class.forget_idle_flows()
        return request

    def discard(self, request: Q) -> None:
        """Takes a waiting request out wherever it stands; its tenant is not charged."""
        queue_class = self._classes.get(class_of(request.priority))
        flow = None if queue_class is None else queue_class.flows.get(request.tenant_id)
        if queue_class is None or flow is None:
            return
        if flow.waiting.pop(request.sequence_number, None) is not None:
            queue_class.num_waiting -= 1

    def _class(self, priority: int) -> _Class[Q]:
        level = class_of(priority)
        if level not in self._classes:
            self._classes[level] = _Class(level, CLASS_WEIGHT**level, self._present)
        return self._classes[level]

    def _flow(self, queue_class: _Class[Q], tenant_id: str) -> _Flow[Q]:
        flow = queue_class.flows.get(tenant_id)
        if flow is None:
            flow = _Flow(self._weights.get(tenant_id, 1.0), queue_class.present)
            queue_class.flows[tenant_id] = flow
        return flow

    @staticmethod
    def _insert(queue_class: _Class[Q], flow: _Flow[Q], request: Q) -> None:
        heapq.heappush(flow.order, request.sequence_number)
        flow.waiting[request.sequence_number] = request
        queue_class.num_waiting += 1
