"""The engine under random operations, also between the start and the end of a step.

The tokens of each sequence equal those of its solo run, despite chunks, cache hits, preemption,
pushes, forks, failed steps, late masks and aborts. At the end no sequence is left and no block is
referenced.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.kv_layout import Reach, Window, first_sent
from shared.messages import SamplingParams
from tests.shared.engine.batching.test_block_pool import listing, replay
from tests.support.engine.masked import SumGrammar
from tests.support.engine.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
    pushed_kv,
    seeded,
    solo,
)

NUM_BLOCKS = 14
VOCAB_SIZE = 22  # six tokens, so that stop tokens are sampled

PROMPTS = st.builds(
    lambda num_shared, num_own, start: [*prompt(num_shared), *prompt(num_own, start=start)],
    st.integers(0, 20),
    st.integers(1, 6),
    st.sampled_from([300, 400]),
)
EXTRAS: list[dict[str, Any]] = [
    {},
    {},
    {"min_tokens": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.25},
    {"bad_words": ((17,), (16, 18), (500, 19))},
    {"logit_bias": ((18, 2.0),), "num_logprobs": 1},
    {"num_logprobs": 2, "logprobs_mode": "processed", "presence_penalty": 0.5},
]


def samplings(extras: list[dict[str, Any]]) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        lambda num_tokens, is_greedy, extra: msgspec.structs.replace(
            greedy(num_tokens) if is_greedy else seeded(num_tokens), **extra
        ),
        st.sampled_from([1, 3, 12, 24]),
        st.booleans(),
        st.sampled_from(extras),
    )


SAMPLINGS = samplings(EXTRAS)  # of choices that continue a prefill, too
SUBMITTED_SAMPLINGS = samplings([*EXTRAS, {"num_prompt_logprobs": 1}])
STOPS = st.sampled_from([(), (17,), (16, 20)])
LATE_AT = st.none() | st.sets(st.integers(0, 23), max_size=6)
REACHES = [
    (None,),
    (Window(2),),
    (Window(9),),
    (None, Window(5)),
    (Window(2), None, Window(9), Window(16)),
]
QUIET = "tenant-q"  # has zero retention
TENANTS = st.sampled_from(["tenant-a", "tenant-a", "tenant-b", QUIET])


def late_grammar(late_at: set[int] | None, output_ids: list[int]) -> SumGrammar | None:
    """One that allows every token, so that it changes none."""
    if late_at is None:
        return None
    num_polls = len(late_at)
    return SumGrammar(
        VOCAB_SIZE, modulus=1, late_at=late_at, compiled_after=num_polls, output_ids=output_ids
    )


def states(*wanted: SequenceState):  # type: ignore[no-untyped-def]
    return precondition(lambda self: any(s.state in wanted for s in self.rig.sequences))


class EngineMachine(RuleBasedStateMachine):
    rig_type = Rig

    @initialize(
        budget=st.sampled_from([1, 5, 64]),
        num_sequences=st.sampled_from([1, 2, 5]),
        reaches=st.sampled_from(REACHES),
    )
    def start(self, budget: int, num_sequences: int, reaches: tuple[Reach, ...]) -> None:
        self.rig = self.rig_type(
            num_blocks=NUM_BLOCKS * len(reaches),
            max_batch_tokens=budget,
            max_sequences=num_sequences,
            vocab_size=VOCAB_SIZE,
            reaches=reaches,
        )
        self.rows: list[ScheduledSequence] = []
        self.expected: dict[Sequence, list[int]] = {}
        self.abandoned: set[Sequence] = set()
        self.replayed: dict[tuple[int, bytes], tuple[str, bytes, int]] = {}
        self.private: set[int] = set()  # blocks with KV of zero retention, not zeroed since

    @rule(
        ids=PROMPTS,
        sampling=SUBMITTED_SAMPLINGS,
        stop=STOPS,
        tenant_id=TENANTS,
        is_reserved=st.booleans(),
        share_received=st.sampled_from([0.0, 0.0, 0.5]),
        late_at=LATE_AT,
    )
    def submit(
        self,
        ids: list[int],
        sampling: SamplingParams,
        stop: tuple[int, ...],
        tenant_id: str,
        is_reserved: bool,
        share_received: float,
        late_at: set[int] | None,
    ) -> None:
        full_output = solo(tuple(ids), sampling, stop, vocab_size=VOCAB_SIZE)
        received = full_output[: int(len(full_output) * share_received)]
        sequence = new_sequence(ids, sampling, output_ids=received, stop=stop, tenant_id=tenant_id)
        sequence.grammar = late_grammar(late_at, received)
        sequence.is_zero_retention = tenant_id == QUIET
        if not is_reserved:
            self.rig.add(sequence)
        elif not self.rig.reserve(sequence):
            return
        self.expected[sequence] = full_output[len(received) :]

    @rule(ids=PROMPTS, tenant_id=TENANTS, is_reserved=st.booleans())
    def prefill(self, ids: list[int], tenant_id: str, is_reserved: bool) -> None:
        reserve_or_add = self.rig.reserve if is_reserved else self.rig.add
        sequence = new_sequence(ids, None, tenant_id=tenant_id)
        sequence.is_zero_retention = tenant_id == QUIET
        reserve_or_add(sequence)

    @rule(tenant_id=st.sampled_from(["tenant-a", "tenant-b"]))
    def drop_tenant(self, tenant_id: str) -> None:
        """Its requests go on, and leave nothing."""
        self.rig.engine.drop_tenants(frozenset((tenant_id,)))
        assert self.rig.engine.pool.num_blocks_of(tenant_id) == 0

    @states(SequenceState.RESERVED)
    @rule(data=st.data())
    def receive_kv(self, data: st.DataObject) -> None:
        sequence = self.draw(data, SequenceState.RESERVED)
        first = sequence.num_computed_tokens
        end = data.draw(st.integers(first, sequence.num_prefill_tokens))
        payload = pushed_kv(sequence.token_ids, first, end - first)
        self.rig.receive_kv(sequence, payload, end)

    @states(SequenceState.HELD)
    @rule(
        data=st.data(),
        sampling=SAMPLINGS,
        stop=STOPS,
        shares_received=st.lists(st.sampled_from([0.0, 0.0, 0.3, 0.6]), max_size=5),
        late_at=LATE_AT,
    )
    def fork(
        self,
        data: st.DataObject,
        sampling: SamplingParams,
        stop: tuple[int, ...],
        shares_received: list[float],
        late_at: set[int] | None,
    ) -> None:
        """Forks the choices of a prompt from a held prefill of all but its last token."""
        parent = self.draw(data, SequenceState.HELD)
        if parent.num_uncomputed_tokens:  # its step failed
            return
        ids = [*parent.token_ids, 500]
        children = []
        for index, share in enumerate(shares_received):
            full_output = solo(
                tuple(ids), sampling, stop, choice_index=index, vocab_size=VOCAB_SIZE
            )
            received = full_output[: int(len(full_output) * share)]
            child = new_sequence(
                ids,
                sampling,
                output_ids=received,
                stop=stop,
                tenant_id=parent.tenant_id,
                choice_index=index,
            )
            child.grammar = late_grammar(late_at, received)
            self.expected[child] = full_output[len(received) :]
            children.append(child)
        self.rig.fork(parent, children)

    @states(SequenceState.HELD)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_prefill(self.draw(data, SequenceState.HELD))

    @states(*SequenceState)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = self.draw(data, *SequenceState)
        self.abandoned.add(sequence)
        if sequence.state is SequenceState.HELD:
            self.release_prefill(sequence)
        else:
            self.rig.engine.abort(sequence)

    @precondition(lambda self: not self.rows)
    @states(SequenceState.RUNNING)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = self.draw(data, SequenceState.RUNNING)
        self.rig.engine.batcher.preempt(sequence)

    @precondition(lambda self: not self.rows)
    @rule()
    def begin(self) -> None:
        self.rows = self.rig.begin()

    @precondition(lambda self: self.rows)
    @rule()
    def end(self) -> None:
        self.rig.end(self.rows)
        self.rows = []

    @precondition(lambda self: not self.rows)
    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.rig.step()

    @precondition(lambda self: self.rows)
    @rule()
    def fail(self) -> None:
        self.abandoned.update(row.sequence for row in self.rows)
        self.rig.fail(self.rows)
        self.rows = []

    def draw(self, data: st.DataObject, *wanted: SequenceState) -> Sequence:
        return data.draw(st.sampled_from([s for s in self.rig.sequences if s.state in wanted]))

    def release_prefill(self, prefill: Sequence) -> None:
        """Checks the KV of the prefill, unless its step failed, and releases it."""
        num_tokens = prefill.num_tokens
        first = first_sent(self.rig.engine.pool.reaches[0], num_tokens, BLOCK_SIZE)
        if prefill not in self.abandoned:
            assert self.rig.read_kv(prefill, first, num_tokens - first) == pushed_kv(
                prefill.token_ids, first, num_tokens - first
            )
        self.rig.engine.release(prefill)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        self.check_private()
        for event in self.rig.engine.pool.take_events():
            replay(event, self.replayed)
        assert self.replayed == listing(self.rig.engine.pool)
        for sequence, expected in self.expected.items():
            tokens = self.rig.output(sequence)
            assert tokens == expected[: len(tokens)]

    def check_private(self) -> None:
        """KV of zero retention is findable for nobody, and zeroed once no sequence holds it."""
        engine, pool = self.rig.engine, self.rig.engine.pool
        assert pool.num_blocks_of(QUIET) == 0
        sources = {source for row in self.rows for source, _ in row.block_copies}
        own = [each for each in engine._sequences() if each.is_zero_retention]
        held = {b for each in own for table in each.held_blocks for b in table}
        self.private = (self.private | held) - set(pool.take_freed())
        assert self.private <= held | sources

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.end(self.rows)
        for _ in range(100):
            self.activate_and_release()
            if self.rig.engine.is_idle:
                break
            for _ in range(100):
                self.rig.step()
        self.holds()
        assert self.rig.engine.is_idle, "a sequence is stuck"
        for sequence, expected in self.expected.items():
            if sequence not in self.abandoned:
                assert self.rig.output(sequence) == expected
                assert self.rig.ending(sequence) in ("stop", "length")

    def activate_and_release(self) -> None:
        for sequence in list(self.rig.sequences):
            if sequence.state is SequenceState.RESERVED:
                self.rig.engine.activate(sequence, sequence.num_computed_tokens)
            elif sequence.state is SequenceState.HELD:
                self.release_prefill(sequence)
        self.rig.check()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


class LongEngineMachine(EngineMachine):
    """The same, many times as long."""


TestLongEngineMachine = pytest.mark.long(LongEngineMachine.TestCase)
TestLongEngineMachine.settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
