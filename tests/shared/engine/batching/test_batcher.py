"""The batcher: which sequences a step computes, in which order, with how many tokens."""

from __future__ import annotations

from shared.engine.batching.batcher import Batcher
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.sequence import Sequence, SequenceState
from tests.support.engine.rig import BLOCK_SIZE, greedy, new_sequence, prompt, row_of

RUNNING, WAITING, HELD = SequenceState.RUNNING, SequenceState.WAITING, SequenceState.HELD


def new_batcher(
    *,
    num_blocks: int = 64,
    max_batch_tokens: int = 16,
    max_sequences: int = 4,
    watermark: float = 0.0,
) -> Batcher:
    return Batcher(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        watermark=watermark,
    )


def new_request(num_tokens: int) -> Sequence:
    return new_sequence(prompt(num_tokens), greedy())


def prefill(num_tokens: int) -> Sequence:
    return new_sequence(prompt(num_tokens), None)


def step(batcher: Batcher) -> list[tuple[Sequence, int]]:
    """Schedules a step and marks its rows as computed; a row that samples grows by one token."""
    rows, _ = batcher.schedule()
    for row in rows:
        samples = row.samples
        row.sequence.num_computed_tokens += row.num_scheduled_tokens
        if samples:
            row.sequence.token_ids.append(1)
    return [(row.sequence, row.num_scheduled_tokens) for row in rows]


def with_kv(batcher: Batcher, num_tokens: int) -> Sequence:
    """A request that already has the KV of all but its last token."""
    sequence = new_request(num_tokens)
    assert batcher.allocate_prompt(sequence, spare=0)
    sequence.num_computed_tokens = num_tokens - 1
    return sequence


def test_long_prompt_is_computed_in_chunks() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    long = new_request(40)
    batcher.add(long)
    assert [step(batcher) for _ in range(4)] == [
        [(long, 16)],
        [(long, 16)],
        [(long, 8)],
        [(long, 1)],
    ]


def test_decode_is_scheduled_before_prefill() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    long, short, last = new_request(30), new_request(2), new_request(6)
    batcher.add(long)
    step(batcher)
    batcher.add(short)
    batcher.add(last)
    assert step(batcher) == [(long, 14), (short, 2)]
    assert step(batcher) == [(long, 1), (short, 1), (last, 6)]


def test_oldest_decode_rows_get_the_budget() -> None:
    batcher = new_batcher(max_batch_tokens=2)
    first, second, third = (with_kv(batcher, 4) for _ in range(3))
    for sequence in (first, second, third):
        batcher.add(sequence)
    assert step(batcher) == [(first, 1), (second, 1)]


def test_rows_take_turns_where_a_step_has_fewer_tokens_than_rows() -> None:
    """For a time, after a step ran out of memory."""
    batcher = new_batcher(num_blocks=512, max_batch_tokens=64, max_sequences=40)
    rows = [with_kv(batcher, 5) for _ in range(40)]
    for each in rows:
        batcher.add(each)
    batcher.limit.lower(64)
    batcher.limit.lower(32)
    assert [len(step(batcher)) for _ in range(10)] == [16] * 10
    assert {each.num_output_tokens for each in rows} == {4}


def test_admission_is_first_come_first_served() -> None:
    batcher = new_batcher(num_blocks=8, max_batch_tokens=64)
    big, too_big, small = new_request(20), new_request(20), new_request(4)
    for sequence in (big, too_big, small):
        batcher.add(sequence)
    assert step(batcher) == [(big, 20)]
    assert list(batcher.waiting) == [too_big, small]


def test_max_sequences_limits_the_batch() -> None:
    batcher = new_batcher(max_sequences=2)
    sequences = [new_request(2) for _ in range(3)]
    for sequence in sequences:
        batcher.add(sequence)
    assert step(batcher) == [(sequences[0], 2), (sequences[1], 2)]
    batcher.remove(sequences[0])
    assert step(batcher) == [(sequences[1], 1), (sequences[2], 2)]


def test_admission_respects_watermark_unless_batch_is_empty() -> None:
    batcher = new_batcher(num_blocks=10, max_batch_tokens=64, watermark=0.2)
    first, second, third = new_request(20), new_request(13), new_request(12)
    batcher.add(first)
    step(batcher)
    batcher.add(second)  # 4 blocks of 5 free: one too many
    assert step(batcher) == [(first, 1)]
    batcher.remove(second)
    batcher.add(third)
    batcher.remove(first)
    batcher.pool.release(first.block_tables[0])
    batcher.waiting.appendleft(new_request(40))  # needs all blocks: allowed in an empty batch
    assert [count for _, count in step(batcher)] == [40]


def test_newest_sequence_is_preempted_without_free_blocks() -> None:
    batcher = new_batcher(num_blocks=4)
    old, new = new_request(8), new_request(8)
    for sequence in (old, new):
        batcher.add(sequence)
    assert step(batcher) == [(old, 8), (new, 8)]
    assert step(batcher) == [(old, 1)]
    assert (new.state, new.num_held_blocks, new.num_computed_tokens) == (WAITING, 0, 0)
    assert (new.num_preemptions, old.num_preemptions, batcher.num_preemptions) == (1, 0, 1)
    assert list(batcher.waiting) == [new]


def test_preempted_sequence_precedes_new_ones() -> None:
    batcher = new_batcher(num_blocks=4)
    old, new, later = new_request(8), new_request(8), new_request(4)
    for sequence in (old, new):
        batcher.add(sequence)
    step(batcher)
    batcher.add(later)
    step(batcher)
    assert list(batcher.waiting) == [new, later]
    batcher.remove(old)
    batcher.pool.release(old.block_tables[0])
    assert step(batcher) == [(new, 9), (later, 4)]


def test_budget_of_a_preempted_row_is_reused() -> None:
    batcher = new_batcher(num_blocks=7, max_batch_tokens=3)
    first, second, third = with_kv(batcher, 8), with_kv(batcher, 8), with_kv(batcher, 10)
    for sequence in (second, third, first):
        batcher.add(sequence)
    second.token_ids.append(1)  # lacks two tokens and a block: scheduled after `third` and `first`
    assert step(batcher) == [(third, 1), (second, 2)]
    assert first.state is WAITING


def test_prefill_is_never_preempted() -> None:
    batcher = new_batcher(num_blocks=5, max_batch_tokens=12)
    growing, pushing = new_request(8), prefill(12)
    batcher.add(growing)
    batcher.add(pushing)
    assert step(batcher) == [(growing, 8), (pushing, 4)]
    assert step(batcher) == [(pushing, 8)]
    assert growing.state is WAITING
    assert pushing.state is RUNNING


def test_sequence_with_kv_runs_at_once() -> None:
    batcher = new_batcher(num_blocks=4)
    waiting, ready = new_request(13), with_kv(batcher, 8)
    batcher.add(waiting)
    batcher.add(ready)
    assert ready.state is RUNNING
    assert step(batcher) == [(ready, 1)]


def test_sequence_with_kv_is_next_when_batch_is_full() -> None:
    batcher = new_batcher(max_sequences=1)
    running, waiting, ready = new_request(4), new_request(4), with_kv(batcher, 8)
    batcher.add(running)
    step(batcher)
    batcher.add(waiting)
    batcher.add(ready)
    assert list(batcher.waiting) == [ready, waiting]
    batcher.remove(running)
    assert step(batcher) == [(ready, 1)]


def test_preempted_sequence_queues_after_those_with_blocks() -> None:
    batcher = new_batcher(num_blocks=4, max_sequences=1)
    growing, ready = new_request(8), with_kv(batcher, 8)
    batcher.add(growing)
    step(batcher)
    batcher.add(ready)
    step(batcher)
    assert growing.state is WAITING
    assert step(batcher) == [(ready, 1)]


def test_fully_cached_prefill_needs_no_step() -> None:
    batcher = new_batcher()
    first = prefill(8)
    first.block_hashes = [b"a" * 16, b"b" * 16]
    assert batcher.allocate_prompt(first, spare=0)
    batcher.pool.commit(
        0,
        first.block_tables[0],
        first.block_hashes,
        tenant_id="tenant-a",
        parent_hash=first.cache_root,
        first_block_index=0,
    )
    again, request = prefill(8), new_request(8)
    again.block_hashes = request.block_hashes = list(first.block_hashes)
    batcher.add(again)
    batcher.add(request)
    rows, found = batcher.schedule()
    assert found == [again]
    assert (again.state, again.num_cached_tokens) == (HELD, 8)
    assert again.block_tables[0] == first.block_tables[0]
    # a request computes at least its last token, in a block that it alone holds
    assert rows == [row_of(request, 4)]
    assert request.block_tables[0][0] == first.block_tables[0][0]
    assert request.block_tables[0][1] not in first.block_tables[0]


def test_allocate_prompt_takes_all_blocks_or_none() -> None:
    batcher = new_batcher(num_blocks=4)
    sequence = new_request(12)
    assert not batcher.allocate_prompt(sequence, spare=2)
    assert (sequence.num_held_blocks, batcher.pool.num_free_blocks) == (0, 4)
    assert batcher.allocate_prompt(sequence, spare=1)
    assert (sequence.num_held_blocks, batcher.pool.num_free_blocks) == (3, 1)


def test_only_completing_rows_of_requests_sample() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    request, pushed = new_request(20), prefill(12)
    for each in (request, pushed):
        batcher.add(each)
    flags = []
    for _ in range(2):
        rows, _ = batcher.schedule()
        flags.append([(row.sequence, row.completes, row.samples) for row in rows])
        for row in rows:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens
    assert flags == [
        [(request, False, False)],
        [(request, True, True), (pushed, True, False)],
    ]
