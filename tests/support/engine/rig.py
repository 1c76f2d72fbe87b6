"""An engine core with a timing executor, driven step by step without an event loop.

Every step checks the invariants: the pool is consistent, the token budget is not exceeded, a row
writes no block that another sequence holds, and the source of a block copy stays referenced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable
from functools import cache
from itertools import chain, count
from typing import Any, TypeVar

import numpy as np

from shared.block_hash import root_hash
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState
from shared.engine.executors.timing_executor import STATE_BYTES, TimingExecutor
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.errors import StepFailed
from shared.kv_layout import Reach, first_seen
from shared.messages import Pooling, SamplingParams, TokenLogprobs
from tests.support.engine.plain_inputs import plain_inputs

T = TypeVar("T")

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
_ids = count()


class InstantClock:
    """A clock whose sleeps take no time, so that executor coroutines end without an event loop."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, delay_s: float) -> None:
        pass


def row_of(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """Returns a row of the sequence in its current state."""
    completes = sequence.num_uncomputed_tokens == num_tokens
    return ScheduledSequence(sequence, num_tokens, sequence.num_computed_tokens, completes)


def inputs_of(rows: list[ScheduledSequence], block_size: int = BLOCK_SIZE) -> StepInputs:
    """Returns the inputs of a first step."""
    plan, masks = PlanBuilder().build(rows)
    return RankState(block_size, len(rows[0].sequence.block_tables)).apply(plan, masks)


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the coroutine suspended")


def greedy(max_tokens: int = 8, *, min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, min_tokens=min_tokens)


def seeded(max_tokens: int = 8, *, seed: int = 7) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, temperature=1.0)


def prompt(num_tokens: int, *, start: int = 100) -> list[int]:
    return list(range(start, start + num_tokens))


def new_sequence(
    prompt_ids: Iterable[int],
    sampling: SamplingParams | None,
    *,
    output_ids: Iterable[int] = (),
    tenant_id: str = "tenant-a",
    stop: Iterable[int] = (),
    choice_index: int = 0,
    pooling: Pooling | None = None,
) -> Sequence:
    prompt_ids = list(prompt_ids)
    return Sequence(
        sequence_id=next(_ids).to_bytes(16, "big"),
        tenant_id=tenant_id,
        cache_root=root_hash(tenant_id, "weights"),
        token_ids=[*prompt_ids, *output_ids],
        num_prompt_tokens=len(prompt_ids),
        sampling=sampling,
        stop_token_ids=frozenset(stop),
        choice_index=choice_index,
        pooling=pooling,
    )


class Rig:
    def __init__(
        self,
        *,
        num_blocks: int = 256,
        max_batch_tokens: int = 64,
        max_sequences: int = 8,
        max_context_tokens: int = 4096,
        vocab_size: int = VOCAB_SIZE,
        reaches: tuple[Reach, ...] = (None,),
        max_blocks: int | None = None,
    ) -> None:
        self.executor = TimingExecutor(
            InstantClock(),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            reaches=reaches,
            max_blocks=max_blocks,
        )
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=max_context_tokens,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            reaches=reaches,
        )
        self.plans, self.state = PlanBuilder(), RankState(BLOCK_SIZE, len(reaches))
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.sequences: list[Sequence] = []
        self.rows: list[ScheduledSequence] = []  # the rows of the current step
        self.tokens: dict[bytes, list[int]] = defaultdict(list)
        self.logprobs: dict[bytes, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[bytes, tuple[TokenLogprobs, ...]] = {}
        self.endings: dict[bytes, StepProgress] = {}
        self.num_computed_tokens = 0

    def add(self, sequence: Sequence) -> Sequence:
        self.engine.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def reserve(self, sequence: Sequence) -> bool:
        is_reserved = self.engine.reserve(sequence)
        if is_reserved:
            self.sequences.append(sequence)
        return is_reserved

    def fork(self, parent: Sequence, children: list[Sequence]) -> list[Sequence]:
        for child in children:
            self.engine.accept(child)
        self.engine.fork(parent, children)
        self.sequences += children
        self.check()
        return children

    def begin(self) -> list[ScheduledSequence]:
        rows, found = self.engine.schedule()
        self.rows = rows
        self._record(found)
        self.check()
        check_rows(rows, self.max_batch_tokens)
        check_writes(rows, self.sequences)
        return rows

    def fail(self, rows: list[ScheduledSequence]) -> list[StepProgress]:
        self.rows = []
        progress = self.engine.fail(rows, StepFailed("the device says no"))
        self.check()
        return progress

    def end(self, rows: list[ScheduledSequence]) -> None:
        if rows:
            self.rows = []
            sampled = self.computed(rows)
            self.num_computed_tokens += sum(row.num_scheduled_tokens for row in rows)
            self._record(self.engine.apply(rows, sampled))
            self.check()

    def computed(self, rows: list[ScheduledSequence]) -> StepOutput:
        plan, masks = self.plans.build(rows)
        output = finish(self.executor.run(self.state.apply(plan, masks)))
        self.state.record(output)
        return output

    def step(self) -> list[ScheduledSequence]:
        rows = self.begin()
        self.end(rows)
        return rows

    def run(self, *, max_steps: int = 5000) -> None:
        """Steps until no sequence waits or runs. Fails the test after `max_steps`."""
        batcher = self.engine.batcher
        for _ in range(max_steps):
            if not (batcher.waiting or batcher.running):
                return
            self.step()
        raise AssertionError(f"{len(batcher.waiting)} waiting, {len(batcher.running)} running")

    def output(self, sequence: Sequence) -> list[int]:
        return self.tokens[sequence.sequence_id]

    def ending(self, sequence: Sequence) -> str | None:
        progress = self.endings.get(sequence.sequence_id)
        return None if progress is None else progress.finish_reason

    def complete(self, sequence: Sequence) -> list[int]:
        """Adds the sequence and runs all sequences. Returns the new tokens of this one."""
        self.add(sequence)
        self.run()
        return self.output(sequence)

    def read_kv(self, sequence: Sequence, first_token: int, num_tokens: int) -> bytearray:
        """Returns the stored KV of the first group of layers."""
        payload = bytearray(self.executor.kv_layout.group_bytes_per_token(0) * num_tokens)
        table = sequence.block_tables[0]
        finish(self.executor.read_kv(KvRun(table, first_token, num_tokens), memoryview(payload)))
        return payload

    def receive_kv(self, sequence: Sequence, payload: bytes | bytearray, num_computed: int) -> None:
        """Writes the KV of the tokens after the cached prefix and activates the sequence."""
        first = sequence.num_computed_tokens
        planes = np.frombuffer(payload, np.uint8).reshape(2, -1, STATE_BYTES // 2)
        for group, table in enumerate(sequence.block_tables):
            begin = max(first, sequence.first_blocks[group] * BLOCK_SIZE)
            if begin < num_computed:
                part = memoryview(planes[:, begin - first :].tobytes())
                finish(
                    self.executor.write_kv(KvRun(table, begin, num_computed - begin, group), part)
                )
        self.engine.activate(sequence, num_computed)

    def check(self) -> None:
        engine, pool = self.engine, self.engine.pool
        pool.check()
        holders = holders_of(self.sequences)
        referenced = Counter(copy[0] for row in self.rows for copy in row.block_copies) + holders
        num_held = sum(block_id < pool.num_blocks for block_id in referenced)
        assert pool.num_blocks - num_held == pool.num_free_blocks
        assert pool.num_retiring_blocks == len(referenced) - num_held
        assert all(pool.ref_count(block_id) == count for block_id, count in referenced.items())
        for sequence in self.sequences:
            own = [
                block_id
                for table, first in zip(sequence.block_tables, sequence.first_blocks, strict=True)
                for block_id in table[max(first, sequence.num_committed_blocks) :]
            ]
            shared = [block_id for block_id in own if holders[block_id] > 1]
            if shared:  # choices before their first write: they share the last, partial block
                assert not sequence.is_in_step, "a row writes a shared block"
                assert shared == own
                assert sequence.num_computed_tokens % BLOCK_SIZE
            assert sequence.num_computed_tokens >= sequence.num_committed_blocks * BLOCK_SIZE
            check_reaches(sequence, pool.reaches)
        assert len(engine.batcher.running) <= self.max_sequences
        self.sequences = [s for s in self.sequences if s.state is not SequenceState.FINISHED]
        assert engine.is_idle == (not self.sequences)
        if engine.is_idle:
            assert pool.num_free_blocks == pool.num_blocks

    def _record(self, progress: list[StepProgress]) -> None:
        for each in progress:
            sequence_id = each.sequence.sequence_id
            assert sequence_id not in self.endings, "progress after the ending"
            self.tokens[sequence_id] += each.token_ids
            self.logprobs[sequence_id] += each.logprobs
            if each.prompt_logprobs:
                assert sequence_id not in self.prompt_logprobs, "received twice"
                self.prompt_logprobs[sequence_id] = each.prompt_logprobs
            if each.finish_reason is not None:
                self.endings[sequence_id] = each


def check_rows(rows: list[ScheduledSequence], max_batch_tokens: int) -> None:
    assert sum(row.num_scheduled_tokens for row in rows) <= max_batch_tokens
    for row in rows:
        sequence = row.sequence
        assert 1 <= row.num_scheduled_tokens <= sequence.num_uncomputed_tokens
        assert sequence.num_computed_tokens // BLOCK_SIZE >= sequence.num_committed_blocks
        end = sequence.num_computed_tokens + row.num_scheduled_tokens
        assert all(end <= len(table) * BLOCK_SIZE for table in sequence.block_tables)


def check_reaches(sequence: Sequence, reaches: tuple[Reach, ...]) -> None:
    """Every block that a later token sees is held, and few more in a bounded group."""
    if not sequence.block_tables or sequence.state is SequenceState.RESERVED:
        return
    num_computed = sequence.num_computed_tokens
    for reach, table, first in zip(
        reaches, sequence.block_tables, sequence.first_blocks, strict=True
    ):
        first_needed = first_seen(reach, num_computed) // BLOCK_SIZE
        assert first <= first_needed
        assert len(table) * BLOCK_SIZE >= num_computed
        if not sequence.is_prefill_only:
            assert first >= first_needed - 1


def holders_of(sequences: list[Sequence]) -> Counter[int]:
    holders: Counter[int] = Counter()
    for sequence in sequences:
        held = list(chain.from_iterable(sequence.held_blocks))
        assert len(set(held)) == len(held)
        holders.update(held)
    return holders


def check_writes(rows: list[ScheduledSequence], sequences: list[Sequence]) -> None:
    """Written blocks have one holder. A block copy goes to the block that its row writes next."""
    if not rows:
        return
    holders = holders_of(sequences)
    inputs = plain_inputs(rows, BLOCK_SIZE)
    assert all(holders[block_id] == 1 for block_id in inputs.slot_mapping.ravel() // BLOCK_SIZE)
    sources = {source for source, _ in inputs.block_copies}
    destinations = [destination for _, destination in inputs.block_copies]
    assert len({*sources, *destinations}) == len(sources) + len(destinations)
    for row in rows:
        if row.block_copies:
            block_index, offset = divmod(row.sequence.num_computed_tokens, BLOCK_SIZE)
            assert offset
            written = [table[block_index] for table in row.sequence.block_tables]
            assert {destination for _, destination in row.block_copies} <= set(written)


@cache
def solo(
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    stop: tuple[int, ...] = (),
    choice_index: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> list[int]:
    """Returns the output of a sequence that runs alone in an engine, its prompt
    computed in one step.
    """
    rig = Rig(max_batch_tokens=4096, vocab_size=vocab_size)
    return rig.complete(new_sequence(prompt_ids, sampling, stop=stop, choice_index=choice_index))


@cache
def prefilled(token_ids: tuple[int, ...]) -> tuple[Rig, Sequence]:
    """Returns another engine and its finished prefill of these tokens, ready to push their KV."""
    rig = Rig(max_batch_tokens=4096)
    sequence = rig.add(new_sequence(token_ids, None))
    rig.run()
    assert sequence.state is SequenceState.HELD
    return rig, sequence


def pushed_kv(token_ids: Iterable[int], first_token: int, num_tokens: int) -> bytearray:
    rig, sequence = prefilled(tuple(token_ids))
    return rig.read_kv(sequence, first_token, num_tokens)
