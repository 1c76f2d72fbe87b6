from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_index.index import Outcome, PrefixIndex, SyncState
from shared.messages import BlockPage, BlocksCleared, BlocksRemoved, BlocksStored, KvEvents
from shared.packing import pack_hashes

FORMAT = "fp32/b16"


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def stored(*numbers: int) -> BlocksStored:
    return BlocksStored(
        tenant_id="t",
        parent_hash=block(999),
        first_block_index=0,
        block_hashes=pack_hashes([block(number) for number in numbers]),
    )


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=pack_hashes([block(number) for number in numbers]))


Event = BlocksStored | BlocksRemoved | BlocksCleared


def events(
    worker_id: str, sequence_number: int, *items: Event, epoch: int = 1, model: str = "m"
) -> KvEvents:
    return KvEvents(
        worker_id=worker_id,
        epoch=epoch,
        sequence_number=sequence_number,
        model=model,
        revision="r1",
        kv_format=FORMAT,
        events=items,
    )


def page(
    worker_id: str,
    sequence_number: int,
    *runs: BlocksStored,
    epoch: int = 1,
    next_cursor: int | None = None,
) -> BlockPage:
    return BlockPage(
        worker_id=worker_id,
        epoch=epoch,
        sequence_number=sequence_number,
        model="m",
        revision="r1",
        kv_format=FORMAT,
        stored=runs,
        next_cursor=next_cursor,
    )


def synced(*worker_ids: str) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id in worker_ids:
        index.add_worker(worker_id, "m", "r1", FORMAT)
        index.begin_resync(worker_id)
        index.add_page(page(worker_id, 0))
        assert index.finish_resync(worker_id) is Outcome.APPLIED
    return index


def found(index: PrefixIndex, *numbers: int, model: str = "m") -> dict[str, int]:
    reply = index.match([block(number) for number in numbers], model, "r1")
    assert len({match.worker_id for match in reply.matches}) == len(reply.matches)
    return {match.worker_id: match.num_blocks for match in reply.matches}


def state(index: PrefixIndex) -> str:
    return index.match([], "m", "r1").state


def test_match_returns_longest_prefix_without_a_gap() -> None:
    index = synced("w0", "w1", "w2", "w3")
    index.apply(events("w0", 1, stored(1, 2, 3)))
    index.apply(events("w1", 1, stored(1, 3)))
    index.apply(events("w2", 1, stored(2, 3)))
    assert found(index, 1, 2, 3, 4) == {"w0": 3, "w1": 1}
    assert found(index, 1, 2) == {"w0": 2, "w1": 1}
    assert found(index, 4) == {}
    assert found(index) == {}
    assert found(index, 1, 2, 3, model="other") == {}


def test_removed_and_cleared_blocks_do_not_match() -> None:
    index = synced("w0", "w1")
    index.apply(events("w0", 1, stored(1, 2, 3)))
    index.apply(events("w1", 1, stored(1, 2, 3)))
    index.apply(events("w0", 2, removed(2)))
    assert found(index, 1, 2, 3) == {"w0": 1, "w1": 3}
    index.apply(events("w1", 2, BlocksCleared(), stored(1)))
    assert found(index, 1, 2, 3) == {"w0": 1, "w1": 1}


def test_gap_degrades_index_until_resync_ends() -> None:
    index = synced("w0")
    index.apply(events("w0", 1, stored(1)))
    assert state(index) == "exact"
    assert index.apply(events("w0", 3, stored(3))) is Outcome.NEEDS_RESYNC
    assert state(index) == "degraded"
    assert found(index, 1) == {"w0": 1}  # known blocks still match
    index.begin_resync("w0")
    assert index.apply(events("w0", 4, removed(1))) is Outcome.QUEUED
    assert index.add_page(page("w0", 3, stored(1, 2), next_cursor=1))
    assert index.apply(events("w0", 5, stored(7))) is Outcome.QUEUED
    assert index.add_page(page("w0", 5, stored(3), next_cursor=None))
    assert index.finish_resync("w0") is Outcome.APPLIED
    assert state(index) == "exact"
    assert found(index, 2, 3, 7) == {"w0": 3}
    assert found(index, 1) == {}
    assert index.apply(events("w0", 6, stored(8))) is Outcome.APPLIED


def test_gap_during_resync_needs_another_resync() -> None:
    index = synced("w0")
    index.begin_resync("w0")
    index.apply(events("w0", 3, stored(3)))
    index.add_page(page("w0", 1, stored(1)))
    assert index.finish_resync("w0") is Outcome.NEEDS_RESYNC
    assert index.state_of("w0") is SyncState.STALE


def test_new_epoch_needs_resync_and_epochs_do_not_mix() -> None:
    index = synced("w0")
    index.apply(events("w0", 1, stored(1)))
    assert index.apply(events("w0", 2, stored(2), epoch=2)) is Outcome.NEEDS_RESYNC
    index.begin_resync("w0")
    assert index.add_page(page("w0", 2, stored(2), epoch=2, next_cursor=1))
    assert not index.add_page(page("w0", 2, stored(2), epoch=3))
    index.begin_resync("w0")
    assert index.add_page(page("w0", 0, epoch=3))
    assert index.finish_resync("w0") is Outcome.APPLIED
    assert found(index, 1) == {}


def test_old_events_are_ignored() -> None:
    index = synced("w0")
    index.apply(events("w0", 1, stored(1)))
    assert index.apply(events("w0", 1, removed(1))) is Outcome.IGNORED
    assert index.apply(events("stranger", 1, stored(1))) is Outcome.IGNORED
    assert found(index, 1) == {"w0": 1}


def test_announced_events_must_arrive_by_the_next_heartbeat() -> None:
    index = synced("w0")
    assert index.announce("w0", 1, 2) is Outcome.APPLIED  # the events may be in flight
    index.apply(events("w0", 1, stored(1)))
    assert index.announce("w0", 2, 2) is Outcome.NEEDS_RESYNC
    assert state(index) == "degraded"
    assert index.announce("w0", 2, 2) is Outcome.APPLIED  # one resync is enough
    index = synced("w0")
    assert index.announce("w0", 7, 5) is Outcome.APPLIED
    assert index.announce("w0", 1, 0) is Outcome.APPLIED  # announced in another epoch
    assert index.announce("stranger", 1, 5) is Outcome.IGNORED


def test_blocks_of_another_epoch_than_the_heartbeats_are_listed_again() -> None:
    """They were listed by a second process of this id, which has left without a change since."""
    index = synced("w0")
    assert index.announce("w0", 2, 0) is Outcome.APPLIED  # a late heartbeat means nothing
    assert index.announce("w0", 2, 0) is Outcome.NEEDS_RESYNC
    assert index.state_of("w0") is SyncState.STALE


def test_abandoned_resync_retains_known_blocks() -> None:
    index = synced("w0")
    index.apply(events("w0", 1, stored(1)))
    index.begin_resync("w0")
    index.add_page(page("w0", 1, stored(5)))
    index.abandon_resync("w0")
    assert (found(index, 1), found(index, 5), state(index)) == ({"w0": 1}, {}, "degraded")


def test_slot_of_a_lost_worker_is_swept_and_reused() -> None:
    index = synced("w0", "w1")
    index.apply(events("w0", 1, stored(*range(100))))
    index.apply(events("w1", 1, stored(0)))
    index.remove_worker("w0")
    assert found(index, 0, 1) == {"w1": 1}
    for _ in range(20):
        index.sweep(10)
    assert index.num_blocks == 1
    index.add_worker("w2", "m", "r1", FORMAT)
    assert found(index, 0, 1) == {"w1": 1}  # w2 has none of w0's blocks
    assert index._num_slots <= 4


def test_a_step_of_a_sweep_lists_few_of_many_blocks() -> None:
    """All of an index of 20 million blocks would hold the event loop for seconds."""
    index = synced("w0", "w1")
    index.apply(events("w0", 1, stored(*range(20_000))))
    index.remove_worker("w0")
    tracemalloc.start()
    try:
        index.sweep(1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000


def test_worker_with_a_changed_model_starts_empty() -> None:
    index = synced("w0")
    index.apply(events("w0", 1, stored(1)))
    assert not index.add_worker("w0", "m", "r1", FORMAT)
    assert index.add_worker("w0", "other", "r1", FORMAT)
    assert found(index, 1) == found(index, 1, model="other") == {}


@dataclass
class Model:
    """Each worker is a set of block numbers; after a lost event it is stale until a resync."""

    true: dict[str, set[int]] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    number: dict[str, int] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)

    def change(self, worker_id: str, name: str, blocks: list[int]) -> Event:
        held = self.true[worker_id]
        self.number[worker_id] += 1
        if name == "store":
            held |= set(blocks)
            return stored(*blocks)
        if name == "remove":
            held -= set(blocks)
            return removed(*blocks)
        held.clear()
        return BlocksCleared()

    def prefix(self, queried: list[int]) -> dict[str, int]:
        lengths = {}
        for worker_id, held in self.seen.items():
            length = next((i for i, b in enumerate(queried) if b not in held), len(queried))
            if length:
                lengths[worker_id] = length
        return lengths


blocks = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True)
workers = st.sampled_from(["w0", "w1", "w2"])
steps = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["store", "remove", "clear"]), workers, blocks, st.integers(0, 9)
        ),
        st.tuples(st.just("resync"), workers, blocks, st.integers(0, 9)),
        st.tuples(st.just("restart"), workers, blocks, st.integers(0, 9)),
        st.tuples(st.just("sweep"), workers, blocks, st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps, blocks)
def test_index_equals_a_naive_model_on_random_operations(
    operations: list[tuple[str, str, list[int], int]], queried: list[int]
) -> None:
    index, model = synced("w0", "w1", "w2"), Model()
    for worker_id in ("w0", "w1", "w2"):
        model.true[worker_id], model.seen[worker_id] = set(), set()
        model.number[worker_id], model.exact[worker_id] = 0, True
    for name, worker_id, numbers, chance in operations:
        if name == "sweep":
            index.sweep(chance)
        elif name == "restart":
            index.remove_worker(worker_id)
            index.add_worker(worker_id, "m", "r1", FORMAT)
            model.true[worker_id], model.seen[worker_id] = set(), set()
            model.number[worker_id], model.exact[worker_id] = 0, False
        elif name == "resync":
            resync(index, model, worker_id, numbers, is_lost=chance == 0)
        else:
            event = model.change(worker_id, name, numbers)
            if chance == 0:
                continue  # lost; the next event shows the gap
            was_exact = model.exact[worker_id]
            outcome = index.apply(events(worker_id, model.number[worker_id], event))
            model.exact[worker_id] = outcome is Outcome.APPLIED
            assert was_exact or outcome is Outcome.NEEDS_RESYNC
            if outcome is Outcome.APPLIED:
                model.seen[worker_id] = set(model.true[worker_id])
        assert found(index, *queried) == model.prefix(queried)
        assert state(index) == ("exact" if all(model.exact.values()) else "degraded")


def resync(
    index: PrefixIndex, model: Model, worker_id: str, numbers: list[int], *, is_lost: bool
) -> None:
    """Adds a page of even blocks, sends an event, then adds a page of odd blocks."""
    index.begin_resync(worker_id)
    halves = [{b for b in model.true[worker_id] if b % 2 == parity} for parity in (0, 1)]
    index.add_page(page(worker_id, model.number[worker_id], stored(*halves[0]), next_cursor=1))
    event = model.change(worker_id, "store" if numbers[0] % 2 else "remove", numbers)
    if not is_lost:
        index.apply(events(worker_id, model.number[worker_id], event))
    odd = {b for b in model.true[worker_id] if b % 2 == 1}
    index.add_page(page(worker_id, model.number[worker_id], stored(*odd)))
    index.finish_resync(worker_id)
    model.exact[worker_id] = True
    model.seen[worker_id] = set(model.true[worker_id])
    if is_lost:  # the next event shows the loss; until then even blocks are those of the first page
        model.seen[worker_id] = halves[0] | odd


def test_queue_of_a_resync_is_bounded_in_blocks() -> None:
    """The bound does not count messages: one message may name half a million blocks."""
    index = PrefixIndex(max_queued_blocks=50)
    index.add_worker("w0", "m", "r1", FORMAT)
    index.begin_resync("w0")
    for number in range(1, 9):
        index.apply(events("w0", number, stored(*range(100 * number, 100 * number + 9))))
    resync = index._workers["w0"].resync
    assert resync is not None
    assert len(resync.queued) == 5
    index.apply(events("w0", 9, removed(1)))  # small, but after a dropped event
    assert len(resync.queued) == 5
