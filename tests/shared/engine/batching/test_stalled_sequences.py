"""A sequence that waits for its grammar delays no other, and never samples without it."""

from __future__ import annotations

import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.errors import StepFailed
from shared.messages import SamplingParams
from tests.support.engine.masked import SumGrammar
from tests.support.engine.rig import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
)

FOREVER = 10**6


def constrained(
    prompt_ids: list[int], sampling: SamplingParams, grammar: SumGrammar | None = None
) -> Sequence:
    sequence = new_sequence(prompt_ids, sampling)
    sequence.grammar = SumGrammar(VOCAB_SIZE) if grammar is None else grammar
    return sequence


def stalled(num_prompt_tokens: int, *, compiled_after: int = FOREVER) -> Sequence:
    grammar = SumGrammar(VOCAB_SIZE, compiled_after=compiled_after)
    return constrained(prompt(num_prompt_tokens), greedy(), grammar)


def test_the_prompt_is_computed_up_to_its_last_token() -> None:
    rig = Rig(max_batch_tokens=8)
    sequence = rig.add(stalled(20))
    assert [[row.num_scheduled_tokens for row in rig.step()] for _ in range(4)] == [
        [8],
        [8],
        [3],
        [],
    ]
    assert sequence.num_uncomputed_tokens == 1
    assert rig.output(sequence) == []


@pytest.mark.parametrize("budget", [3, 64])
def test_waiting_for_the_grammar_changes_no_token(budget: int) -> None:
    undisturbed, rig = Rig(), Rig(max_batch_tokens=budget)
    expected = undisturbed.complete(constrained(prompt(20), greedy()))
    assert rig.complete(stalled(20, compiled_after=15)) == expected
    assert rig.num_computed_tokens == undisturbed.num_computed_tokens


def test_a_stalled_sequence_runs_without_a_row() -> None:
    """Also one that is admitted with all but its last token in the cache."""
    rig = Rig()
    rig.complete(new_sequence(prompt(9), greedy(1)))
    sequence = rig.add(stalled(9))
    assert rig.step() == rig.step() == []
    assert sequence.state is SequenceState.RUNNING
    assert len(sequence.block_tables[0]) == rig.engine.pool.blocks_for(9)
    rig.engine.abort(sequence)
    rig.check()


def test_others_are_computed_meanwhile() -> None:
    rig = Rig()
    waiting = rig.add(stalled(9))
    free = rig.add(new_sequence(prompt(9, start=50), greedy(20)))
    for _ in range(20):
        rig.step()
    assert rig.ending(free) == "length"
    assert rig.output(waiting) == []


def test_a_stalled_sequence_may_be_preempted() -> None:
    rig = Rig(num_blocks=6)
    older = rig.add(new_sequence(prompt(9, start=50), greedy(12)))
    rig.step()
    sequence = rig.add(stalled(9, compiled_after=30))
    rig.run()
    assert sequence.num_preemptions == 1
    assert rig.ending(older) == "length"
    assert rig.output(sequence) == Rig().complete(constrained(prompt(9), greedy()))


@pytest.mark.parametrize("is_running", [True, False])
def test_a_failed_grammar_ends_its_sequence(is_running: bool) -> None:
    rig = Rig(max_sequences=2 if is_running else 1)
    other = rig.add(new_sequence(prompt(9, start=50), greedy()))
    sequence = rig.add(constrained(prompt(2 * BLOCK_SIZE), greedy()))
    rig.step()
    assert sequence.state is (SequenceState.RUNNING if is_running else SequenceState.WAITING)
    assert isinstance(sequence.grammar, SumGrammar)
    sequence.grammar.error = StepFailed("the grammar failed")
    rig.step()
    progress = rig.endings[sequence.sequence_id]
    assert (progress.finish_reason, progress.error) == ("failed", sequence.grammar.error)
    rig.run()
    assert rig.ending(other) == "length"


def test_the_grammar_accepts_tokens_that_another_follows() -> None:
    rig = Rig()
    sequence = constrained(prompt(9), greedy(6))
    tokens = rig.complete(sequence)
    assert isinstance(sequence.grammar, SumGrammar)
    assert sequence.grammar.accepted == tokens[:5]


def test_a_grammar_that_only_allows_the_end_ends_before_min_tokens() -> None:
    rig = Rig()
    grammar = SumGrammar(VOCAB_SIZE, length=3, end=2)
    sequence = constrained(prompt(9), greedy(20, min_tokens=10), grammar)
    sequence.stop_token_ids = frozenset({2})
    assert len(rig.complete(sequence)) == 3
    assert rig.endings[sequence.sequence_id].stop_token_id == 2
