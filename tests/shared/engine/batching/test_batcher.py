"""The batcher: who takes part in a step, in which order, with how many tokens."""

from __future__ import annotations

from shared.engine.batching.batcher import Batcher
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.sequence import Sequence, SequenceState
from tests.shared.engine.support.rig import BLOCK_SIZE, greedy, new_sequence, prompt, row_of

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


def asking(num_tokens: int) -> Sequence:
    return new_sequence(prompt(num_tokens), greedy())


def prefill(num_tokens: int) -> Sequence:
    return new_sequence(prompt(num_tokens), None)


def step(batcher: Batcher) -> list[tuple[Sequence, int]]:
    """Schedules and takes every row for computed; a row that samples grows by one token."""
    rows, _ = batcher.schedule()
    for row in rows:
        samples = row.samples
        row.sequence.num_computed_tokens += row.num_scheduled_tokens
        if samples:
            row.sequence.token_ids.append(1)
    return [(row.sequence, row.num_scheduled_tokens) for row in rows]


def holder(batcher: Batcher, num_tokens: int) -> Sequence:
    """A sequence that brings the KV of all but its last token."""
    sequence = asking(num_tokens)
    assert batcher.allocate_prompt(sequence, spare=0)
    sequence.num_computed_tokens = num_tokens - 1
    return sequence


def test_a_long_prompt_is_computed_in_chunks() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    long = asking(40)
    batcher.add(long)
    assert [step(batcher) for _ in range(4)] == [
        [(long, 16)],
        [(long, 16)],
        [(long, 8)],
        [(long, 1)],
    ]


def test_decode_comes_before_prefill_and_prefill_takes_the_rest() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    long, short, last = asking(30), asking(2), asking(6)
    batcher.add(long)
    step(batcher)
    batcher.add(short)
    batcher.add(last)
    assert step(batcher) == [(long, 14), (short, 2)]
    assert step(batcher) == [(long, 1), (short, 1), (last, 6)]


def test_decode_rows_beyond_the_budget_wait_for_the_older_ones() -> None:
    batcher = new_batcher(max_batch_tokens=2)
    first, second, third = (holder(batcher, 4) for _ in range(3))
    for sequence in (first, second, third):
        batcher.add(sequence)
    assert step(batcher) == [(first, 1), (second, 1)]


def test_admission_is_first_come_first_served() -> None:
    batcher = new_batcher(num_blocks=8, max_batch_tokens=64)
    big, too_big, small = asking(20), asking(20), asking(4)
    for sequence in (big, too_big, small):
        batcher.add(sequence)
    assert step(batcher) == [(big, 20)]
    assert list(batcher.waiting) == [too_big, small]


def test_runs_no_more_sequences_than_allowed() -> None:
    batcher = new_batcher(max_sequences=2)
    sequences = [asking(2) for _ in range(3)]
    for sequence in sequences:
        batcher.add(sequence)
    assert step(batcher) == [(sequences[0], 2), (sequences[1], 2)]
    batcher.remove(sequences[0])
    assert step(batcher) == [(sequences[1], 1), (sequences[2], 2)]


def test_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    batcher = new_batcher(num_blocks=10, max_batch_tokens=64, watermark=0.2)
    first, second, third = asking(20), asking(13), asking(12)
    batcher.add(first)
    step(batcher)
    batcher.add(second)  # 4 blocks of 5 free: one too many
    assert step(batcher) == [(first, 1)]
    batcher.remove(second)
    batcher.add(third)
    batcher.remove(first)
    batcher.pool.release(first.block_table)
    batcher.waiting.appendleft(asking(40))  # all blocks: fine when it is alone
    assert [count for _, count in step(batcher)] == [40]


def test_preempts_the_newest_when_blocks_run_out() -> None:
    batcher = new_batcher(num_blocks=4)
    old, new = asking(8), asking(8)
    for sequence in (old, new):
        batcher.add(sequence)
    assert step(batcher) == [(old, 8), (new, 8)]
    assert step(batcher) == [(old, 1)]
    assert (new.state, len(new.block_table), new.num_computed_tokens) == (WAITING, 0, 0)
    assert (new.num_preemptions, old.num_preemptions) == (1, 0)
    assert list(batcher.waiting) == [new]


def test_a_preempted_sequence_returns_before_those_that_never_ran() -> None:
    batcher = new_batcher(num_blocks=4)
    old, new, later = asking(8), asking(8), asking(4)
    for sequence in (old, new):
        batcher.add(sequence)
    step(batcher)
    batcher.add(later)
    step(batcher)
    assert list(batcher.waiting) == [new, later]
    batcher.remove(old)
    batcher.pool.release(old.block_table)
    assert step(batcher) == [(new, 9), (later, 4)]


def test_the_victims_share_of_the_budget_is_free_again() -> None:
    batcher = new_batcher(num_blocks=7, max_batch_tokens=3)
    first, second, third = holder(batcher, 8), holder(batcher, 8), holder(batcher, 10)
    for sequence in (second, third, first):
        batcher.add(sequence)
    second.token_ids.append(1)  # lacks two tokens and a block: goes after `third` and `first`
    assert step(batcher) == [(third, 1), (second, 2)]
    assert first.state is WAITING


def test_a_prefill_is_never_preempted() -> None:
    batcher = new_batcher(num_blocks=5, max_batch_tokens=12)
    growing, pushing = asking(8), prefill(12)
    batcher.add(growing)
    batcher.add(pushing)
    assert step(batcher) == [(growing, 8), (pushing, 4)]
    assert step(batcher) == [(pushing, 8)]
    assert growing.state is WAITING
    assert pushing.state is RUNNING


def test_who_brings_its_kv_runs_at_once() -> None:
    batcher = new_batcher(num_blocks=4)
    waiting, bringing = asking(13), holder(batcher, 8)
    batcher.add(waiting)
    batcher.add(bringing)
    assert bringing.state is RUNNING
    assert step(batcher) == [(bringing, 1)]


def test_who_brings_its_kv_is_the_next_when_the_batch_is_full() -> None:
    batcher = new_batcher(max_sequences=1)
    running, waiting, bringing = asking(4), asking(4), holder(batcher, 8)
    batcher.add(running)
    step(batcher)
    batcher.add(waiting)
    batcher.add(bringing)
    assert list(batcher.waiting) == [bringing, waiting]
    batcher.remove(running)
    assert step(batcher) == [(bringing, 1)]


def test_a_preempted_sequence_does_not_queue_before_one_that_holds_its_blocks() -> None:
    batcher = new_batcher(num_blocks=4, max_sequences=1)
    growing, bringing = asking(8), holder(batcher, 8)
    batcher.add(growing)
    step(batcher)
    batcher.add(bringing)
    step(batcher)
    assert growing.state is WAITING
    assert step(batcher) == [(bringing, 1)]


def test_a_prefill_that_the_cache_has_entirely_needs_no_step() -> None:
    batcher = new_batcher()
    first = prefill(8)
    first.block_hashes = [b"a" * 16, b"b" * 16]
    assert batcher.allocate_prompt(first, spare=0)
    batcher.pool.commit(
        first.block_table,
        first.block_hashes,
        tenant_id="tenant-a",
        parent_hash=first.cache_root,
        first_block_index=0,
    )
    again, asked = prefill(8), asking(8)
    again.block_hashes = asked.block_hashes = list(first.block_hashes)
    batcher.add(again)
    batcher.add(asked)
    rows, found = batcher.schedule()
    assert found == [again]
    assert (again.state, again.num_cached_tokens) == (HELD, 8)
    assert again.block_table == first.block_table
    # who samples computes its last token at least, and never in a block that others see
    assert rows == [row_of(asked, 4)]
    assert asked.block_table[0] == first.block_table[0]
    assert asked.block_table[1] not in first.block_table


def test_takes_all_blocks_or_none() -> None:
    batcher = new_batcher(num_blocks=4)
    sequence = asking(12)
    assert not batcher.allocate_prompt(sequence, spare=2)
    assert (len(sequence.block_table), batcher.pool.num_free_blocks) == (0, 4)
    assert batcher.allocate_prompt(sequence, spare=1)
    assert (len(sequence.block_table), batcher.pool.num_free_blocks) == (3, 1)


def test_only_the_last_token_samples() -> None:
    batcher = new_batcher(max_batch_tokens=16)
    asked, pushed = asking(20), prefill(12)
    for each in (asked, pushed):
        batcher.add(each)
    told = []
    for _ in range(2):
        rows, _ = batcher.schedule()
        told.append([(row.sequence, row.completes, row.samples) for row in rows])
        for row in rows:
            row.sequence.num_computed_tokens += row.num_scheduled_tokens
    assert told == [
        [(asked, False, False)],
        [(asked, True, True), (pushed, True, False)],
    ]
