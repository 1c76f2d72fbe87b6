from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.fair_queue import FairQueue, class_of


@dataclass(frozen=True)
class Item:
    sequence_number: int
    tenant_id: str
    num_tokens: int
    priority: int = 0


@dataclass
class Model:
    """The same rule without data structures: look at everything, every time."""

    waiting: list[Item] = field(default_factory=list)
    class_time: dict[int, float] = field(default_factory=dict)
    tenant_time: dict[tuple[int, str], float] = field(default_factory=dict)
    present: dict[int | None, float] = field(default_factory=dict)

    def push(self, item: Item) -> None:
        level, flow = class_of(item.priority), (class_of(item.priority), item.tenant_id)
        if not any(class_of(each.priority) == level for each in self.waiting):
            self.class_time[level] = max(self.class_time.get(level, 0), self.present.get(None, 0))
        if not any((class_of(e.priority), e.tenant_id) == flow for e in self.waiting):
            self.tenant_time[flow] = max(self.tenant_time.get(flow, 0), self.present.get(level, 0))
        self.waiting.append(item)

    def pop(self) -> Item | None:
        if not self.waiting:
            return None
        item = min(self.waiting, key=self._rank)
        level, flow = class_of(item.priority), (class_of(item.priority), item.tenant_id)
        self.waiting.remove(item)
        self.present |= {None: self.class_time[level], level: self.tenant_time[flow]}
        self.class_time[level] += item.num_tokens / 4.0**level
        self.tenant_time[flow] += item.num_tokens
        return item

    def _rank(self, item: Item) -> tuple[float, int, float, int]:
        level = class_of(item.priority)
        flow_time = self.tenant_time[level, item.tenant_id]
        heads = [
            each.sequence_number
            for each in self.waiting
            if (class_of(each.priority), each.tenant_id) == (level, item.tenant_id)
        ]
        return (
            self.class_time[level],
            -level,
            flow_time,
            # the head decides between tenants, arrival within one
            min(heads) * 10**6 + item.sequence_number,
        )


operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abcd"), st.integers(1, 64), st.integers(-1, 1)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("push_back")),
        st.tuples(st.just("discard"), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(operations)
def test_equals_the_model_on_random_operations(steps: list[tuple]) -> None:
    queue: FairQueue[Item] = FairQueue()
    model = Model()
    for number, (name, *arguments) in enumerate(steps):
        match name:
            case "push":
                tenant_id, num_tokens, priority = arguments
                item = Item(number, tenant_id, num_tokens, priority)
                queue.push(item)
                model.push(item)
            case "pop":
                assert queue.pop() == model.pop()
            case "push_back":
                # Popped and pushed back at once, the next pop must give the same request.
                first = queue.pop()
                if first is not None:
                    queue.push_back(first)
                    assert queue.pop() == first == model.pop()
            case "discard" if model.waiting:
                item = model.waiting[arguments[0] % len(model.waiting)]
                model.waiting.remove(item)
                queue.discard(item)
        assert len(queue) == len(model.waiting)


@given(
    st.lists(st.integers(1, 50), min_size=30, max_size=30),
    st.lists(st.integers(1, 50), min_size=30, max_size=30),
)
def test_backlogged_tenants_differ_by_at_most_the_largest_requests(
    costs_a: list[int], costs_b: list[int]
) -> None:
    queue: FairQueue[Item] = FairQueue()
    for number, (cost_a, cost_b) in enumerate(zip(costs_a, costs_b, strict=True)):
        queue.push(Item(2 * number, "a", cost_a))
        queue.push(Item(2 * number + 1, "b", cost_b))
    served, left = {"a": 0, "b": 0}, {"a": 30, "b": 30}
    while all(left.values()):
        item = queue.pop()
        assert item is not None
        served[item.tenant_id] += item.num_tokens
        left[item.tenant_id] -= 1
        assert abs(served["a"] - served["b"]) <= max(costs_a) + max(costs_b)


def drain(queue: FairQueue[Item]) -> list[int]:
    order = []
    while (item := queue.pop()) is not None:
        order.append(item.sequence_number)
    return order


def test_fair_in_tokens_not_in_requests() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(3):
        queue.push(Item(number, "long", 100))
    for number in range(3, 9):
        queue.push(Item(number, "short", 50))
    assert drain(queue) == [0, 3, 4, 1, 5, 6, 2, 7, 8]


def test_a_higher_class_goes_first_and_a_lower_one_does_not_starve() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(4):
        queue.push(Item(number, "a", 10))
    for number in range(4, 14):
        queue.push(Item(number, "a", 10, priority=1))
    assert drain(queue) == [4, 0, 5, 6, 7, 8, 1, 9, 10, 11, 12, 2, 13, 3]


def test_weights_share_the_tokens() -> None:
    queue: FairQueue[Item] = FairQueue({"big": 2.0})
    for number in range(4):
        queue.push(Item(number, "big", 10))
    for number in range(4, 8):
        queue.push(Item(number, "small", 10))
    assert drain(queue) == [0, 4, 1, 2, 5, 3, 6, 7]


def test_idling_earns_no_credit() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(20):
        queue.push(Item(number, "busy", 10))
    for _ in range(10):
        queue.pop()
    for number in range(20, 24):
        queue.push(Item(number, "idle", 10))
    assert drain(queue)[:8] == [20, 10, 21, 11, 22, 12, 23, 13]


def test_idle_tenants_are_forgotten() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "steady", 1))
    for number in range(1, 3000):
        queue.push(Item(number, f"tenant-{number}", 10))
        queue.pop()
    assert len(queue._classes[0].flows) <= 1025


def test_coming_back_earns_no_credit_for_a_tenant() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "returning", 10))
    queue.pop()
    for number in range(1, 21):
        queue.push(Item(number, "busy", 10))
    for _ in range(10):
        queue.pop()
    for number in range(21, 25):
        queue.push(Item(number, "returning", 10))
    assert drain(queue)[:8] == [21, 11, 22, 12, 23, 13, 24, 14]


def test_coming_back_earns_no_credit_for_a_class() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(0, "a", 10, priority=1))
    queue.pop()
    for number in range(1, 21):
        queue.push(Item(number, "a", 10))
    for _ in range(10):
        queue.pop()
    for number in range(21, 26):
        queue.push(Item(number, "a", 40, priority=1))
    assert drain(queue)[:8] == [21, 22, 11, 23, 12, 24, 13, 25]
