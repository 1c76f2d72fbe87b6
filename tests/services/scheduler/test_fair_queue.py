from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.fair_queue import AGEING_S, FairQueue, class_of


@dataclass(frozen=True)
class Item:
    sequence_number: int
    queue_id: str
    num_tokens: int
    priority: int = 0
    weight: float = 1.0
    deadline_at: float = 600.0


@dataclass
class Model:
    """The same rule without heaps: each operation examines all waiting requests."""

    waiting: list[Item] = field(default_factory=list)
    class_time: dict[int, float] = field(default_factory=dict)
    class_waits_since: dict[int, float] = field(default_factory=dict)
    tenant_time: dict[tuple[int, str], float] = field(default_factory=dict)
    present: dict[int | None, float] = field(default_factory=lambda: {None: 0.0})

    def push(self, item: Item, now: float) -> None:
        level, flow = class_of(item.priority), (class_of(item.priority), item.queue_id)
        if not any(class_of(each.priority) == level for each in self.waiting):
            self.class_time[level] = max(self.class_time.get(level, 0), self.present[None])
            self.class_waits_since[level] = now
        if not any((class_of(e.priority), e.queue_id) == flow for e in self.waiting):
            self.tenant_time[flow] = max(self.tenant_time.get(flow, 0), self.present.get(level, 0))
        self.waiting.append(item)

    def pop(self, now: float) -> Item | None:
        if not self.waiting:
            return None
        item = min(self.waiting, key=lambda each: self._rank(each, now))
        level, flow = class_of(item.priority), (class_of(item.priority), item.queue_id)
        self.waiting.remove(item)
        self.present[None] = max(self.present[None], self._due(level, now))
        self.present[level] = self.tenant_time[flow]
        self.class_waits_since[level] = now
        self.class_time[level] += item.num_tokens / 4.0**level
        self.tenant_time[flow] += item.num_tokens / item.weight
        return item

    def _due(self, level: int, now: float) -> float:
        present, virtual = self.present[None], self.class_time[level]
        patience = max(0.0, 1.0 - (now - self.class_waits_since[level]) / AGEING_S)
        return min(virtual, present + (virtual - present) * patience)

    def _rank(self, item: Item, now: float) -> tuple:
        level = class_of(item.priority)
        own = [
            (each.deadline_at, each.sequence_number)
            for each in self.waiting
            if (class_of(each.priority), each.queue_id) == (level, item.queue_id)
        ]
        flow_time = self.tenant_time[level, item.queue_id]
        # the first request ranks its tenant; the deadline ranks the tenant's requests
        return (
            *(self._due(level, now), -level, flow_time),
            *(min(own), item.deadline_at, item.sequence_number),
        )


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from("abcd"),
            st.integers(1, 64),
            st.integers(-1, 1),
            st.sampled_from([0.5, 1.0, 4.0]),
            st.sampled_from([10.0, 30.0]),
        ),
        st.tuples(st.just("pop")),
        st.tuples(st.just("push_back")),
        st.tuples(st.just("discard"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 12.0])),
    ),
    max_size=80,
)


@given(operations)
def test_queue_equals_the_model_on_random_operations(steps: list[tuple]) -> None:
    queue: FairQueue[Item] = FairQueue()
    model = Model()
    now = 0.0
    for number, (name, *arguments) in enumerate(steps):
        match name:
            case "push":
                queue_id, num_tokens, priority, weight, deadline_s = arguments
                item = Item(number, queue_id, num_tokens, priority, weight, now + deadline_s)
                queue.push(item, now)
                model.push(item, now)
            case "pop":
                assert queue.pop(now) == model.pop(now)
            case "push_back":
                # After a pop and a push_back, the next pop returns the same request.
                first = queue.pop(now)
                if first is not None:
                    queue.push_back(first, now)
                    assert queue.pop(now) == first == model.pop(now)
            case "wait":
                now += arguments[0]
            case "discard" if model.waiting:
                item = model.waiting.pop(arguments[0] % len(model.waiting))
                queue.discard(item)
        assert len(queue) == len(model.waiting)


@given(
    st.lists(st.integers(1, 50), min_size=30, max_size=30),
    st.lists(st.integers(1, 50), min_size=30, max_size=30),
    st.sampled_from([0.25, 1.0, 3.0]),
)
def test_backlogged_tenants_differ_by_at_most_the_largest_requests(
    costs_a: list[int], costs_b: list[int], weight_b: float
) -> None:
    """The unit is tokens divided by weight."""
    queue: FairQueue[Item] = FairQueue()
    for number, (cost_a, cost_b) in enumerate(zip(costs_a, costs_b, strict=True)):
        queue.push(Item(2 * number, "a", cost_a), 0.0)
        queue.push(Item(2 * number + 1, "b", cost_b, weight=weight_b), 0.0)
    served, left = {"a": 0.0, "b": 0.0}, {"a": 30, "b": 30}
    while all(left.values()):
        item = queue.pop(0.0)
        assert item is not None
        served[item.queue_id] += item.num_tokens / item.weight
        left[item.queue_id] -= 1
        assert abs(served["a"] - served["b"]) <= max(costs_a) + max(costs_b) / weight_b + 1e-9


def drain(queue: FairQueue[Item]) -> list[int]:
    order = []
    while (item := queue.pop(0.0)) is not None:
        order.append(item.sequence_number)
    return order


def test_queue_is_fair_in_tokens_not_in_requests() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(3):
        queue.push(Item(number, "long", 100), 0.0)
    for number in range(3, 9):
        queue.push(Item(number, "short", 50), 0.0)
    assert drain(queue) == [0, 3, 4, 1, 5, 6, 2, 7, 8]


def test_higher_class_is_first_and_lower_does_not_starve() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(4):
        queue.push(Item(number, "a", 10), 0.0)
    for number in range(4, 14):
        queue.push(Item(number, "a", 10, priority=1), 0.0)
    assert drain(queue) == [4, 0, 5, 6, 7, 8, 1, 9, 10, 11, 12, 2, 13, 3]


def test_tenants_share_tokens_by_weight() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(4):
        queue.push(Item(number, "big", 10, weight=2.0), 0.0)
    for number in range(4, 8):
        queue.push(Item(number, "small", 10), 0.0)
    assert drain(queue) == [0, 4, 1, 2, 5, 3, 6, 7]


def test_new_tenant_has_no_credit_for_earlier_time() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(20):
        queue.push(Item(number, "busy", 10), 0.0)
    for _ in range(10):
        queue.pop(0.0)
    for number in range(20, 24):
        queue.push(Item(number, "idle", 10), 0.0)
    assert drain(queue)[:8] == [20, 10, 21, 11, 22, 12, 23, 13]


def test_idle_tenants_are_forgotten() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "steady", 1), 0.0)
    for number in range(1, 3000):
        queue.push(Item(number, f"tenant-{number}", 10), 0.0)
        queue.pop(0.0)
    assert len(queue._classes[0].flows) <= 1025


def test_returning_tenant_has_no_credit_for_idle_time() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "returning", 10), 0.0)
    queue.pop(0.0)
    for number in range(1, 21):
        queue.push(Item(number, "busy", 10), 0.0)
    for _ in range(10):
        queue.pop(0.0)
    for number in range(21, 25):
        queue.push(Item(number, "returning", 10), 0.0)
    assert drain(queue)[:8] == [21, 11, 22, 12, 23, 13, 24, 14]


def test_returning_class_has_no_credit_for_idle_time() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "a", 10, priority=1), 0.0)
    queue.pop(0.0)
    for number in range(1, 21):
        queue.push(Item(number, "a", 10), 0.0)
    for _ in range(10):
        queue.pop(0.0)
    for number in range(21, 26):
        queue.push(Item(number, "a", 40, priority=1), 0.0)
    assert drain(queue)[:8] == [21, 22, 11, 23, 12, 24, 13, 25]


def test_tenant_requests_are_ordered_by_deadline() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number, deadline_at in enumerate([60.0, 30.0, 60.0, 5.0]):
        queue.push(Item(number, "a", 10, deadline_at=deadline_at), 0.0)
    queue.push(Item(4, "b", 10, deadline_at=50.0), 0.0)
    assert drain(queue) == [3, 4, 1, 0, 2]


def test_ageing_class_is_served_and_its_tenants_alternate() -> None:
    """By weight alone, its second request would follow 4^8 requests of the highest class."""
    queue: FairQueue[Item] = FairQueue()
    for number in range(9):
        queue.push(Item(number, "flooder" if number < 8 else "modest", 10, priority=-4), 0.0)
    served = []
    for tick in range(200):
        now = tick / 10
        queue.push(Item(tick + 9, "high", 10, priority=4), now)
        item = queue.pop(now)
        assert item is not None
        if item.queue_id != "high":
            served.append((item.queue_id, now))
    names = [name for name, _ in served]
    assert names[:3] == ["flooder", "modest", "flooder"]
    gaps = [later - now for (_, now), (_, later) in pairwise(served)]
    assert all(4.5 < gap <= AGEING_S + 0.1 for gap in gaps)
    assert len(gaps) >= 2


def test_heap_sizes_are_bounded_by_waiting_requests() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(5000):
        queue.push(Item(number, "a", 10), 0.0)
        if number % 2:
            queue.pop(0.0)
        else:
            queue.discard(Item(number, "a", 10))
    flow = queue._classes[0].flows["a"]
    assert max(len(flow.order), len(queue._classes[0].ranking)) < 200
