"""Engines force the end of reasoning when its budget is spent, however a sequence is scheduled."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import msgspec
import pytest

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.token_masks.budgeted_output import BudgetedOutput
from shared.grammar.spec import GrammarSpec
from shared.grammar.thinking import ThinkingBudget
from shared.messages import SamplingParams
from tests.shared.engine.executors.test_steps_in_flight import CheckedExecutor, Worker
from tests.shared.engine.test_engine_operations import VOCAB_SIZE as SMALL_VOCAB
from tests.shared.engine.token_masks.support import TENANT, grammars_of, rig_of
from tests.shared.grammar.support import EOS, InlineThreads, allowed, compiled, encode, vocabulary
from tests.support.engine.planned_rig import PlannedRig
from tests.support.engine.rig import VOCAB_SIZE, Rig, greedy, new_sequence, prompt, seeded
from tests.support.world.clock import run

PROMPT = prompt(11)
CLOSE = (991, 992, 993)
BUDGET = ThinkingBudget(max_tokens=6, closes=(CLOSE,), is_open=True)
SAMPLINGS = pytest.mark.parametrize("sampling", [greedy(30), seeded(30)], ids=["greedy", "seeded"])


def budgeted(
    sampling: SamplingParams,
    budget: ThinkingBudget = BUDGET,
    *,
    output_ids: Tokens[int] = (),
    vocab_size: int = VOCAB_SIZE,
    **fields: Any,
) -> Sequence:
    sampling = msgspec.structs.replace(sampling, thinking=budget)
    sequence = new_sequence(PROMPT, sampling, output_ids=output_ids, **fields)
    sequence.grammar = BudgetedOutput(budget, vocab_size, None, output_ids)
    return sequence


def undisturbed(sampling: SamplingParams, **fields: Any) -> list[int]:
    return Rig().complete(budgeted(sampling, **fields))


@SAMPLINGS
def test_output_is_the_free_one_then_the_mark_then_goes_on(sampling: SamplingParams) -> None:
    free = Rig().complete(new_sequence(PROMPT, sampling))
    output = undisturbed(sampling)
    assert output[:6] == free[:6]
    assert tuple(output[6:9]) == CLOSE
    rest = Rig().complete(new_sequence(PROMPT, sampling, output_ids=output[:9]))
    assert output[9:] == rest
    assert len(output) == 30


def test_output_within_its_budget_is_the_free_one() -> None:
    free = Rig().complete(new_sequence(PROMPT, greedy(30)))
    wide = msgspec.structs.replace(BUDGET, max_tokens=30)
    closed = msgspec.structs.replace(BUDGET, is_open=False)
    ended = msgspec.structs.replace(BUDGET, closes=(CLOSE, tuple(free[2:4])))
    for budget in (wide, closed, ended):
        assert Rig().complete(budgeted(greedy(30), budget)) == free


@SAMPLINGS
@pytest.mark.parametrize("num_before", [1, 5, 6, 7, 8, 9, 12])
def test_resumed_output_is_the_undisturbed_one(sampling: SamplingParams, num_before: int) -> None:
    """In the middle of reasoning, in the middle of the mark, and after it."""
    straight = undisturbed(sampling)
    before = straight[:num_before]
    assert before + undisturbed(sampling, output_ids=before) == straight


def test_what_forbids_the_mark_does_not_count() -> None:
    """Stop tokens before min_tokens, bad words, a bias; the mark may even stop the output."""
    hindered = msgspec.structs.replace(
        greedy(30),
        bad_words=(CLOSE, (CLOSE[0],)),
        logit_bias=tuple((each, -100.0) for each in CLOSE),
        repetition_penalty=100.0,
    )
    assert tuple(undisturbed(hindered)[6:9]) == CLOSE
    rig = Rig()
    sequence = rig.add(budgeted(greedy(30, min_tokens=20), stop=CLOSE[1:2]))
    rig.run()
    assert rig.output(sequence)[6:] == [CLOSE[0]]
    assert rig.ending(sequence) == "stop"


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs(mode: Any) -> None:
    rig = Rig()
    sampling = msgspec.structs.replace(greedy(12), num_logprobs=2, logprobs_mode=mode)
    sequence = rig.add(budgeted(sampling))
    rig.run()
    found = rig.logprobs[sequence.sequence_id]
    assert len(found) == 12
    assert rig.output(sequence) == undisturbed(greedy(12))


def test_preempted_sequences_and_ranks_give_the_same_tokens() -> None:
    rig = PlannedRig(num_blocks=22)
    each = [rig.add(budgeted(seeded(30, seed=seed))) for seed in range(4)]
    rig.run()
    assert sum(sequence.num_preemptions for sequence in each) > 0
    for seed, sequence in enumerate(each):
        assert rig.output(sequence) == undisturbed(seeded(30, seed=seed))


def test_forked_choices_give_the_same_tokens() -> None:
    rig = Rig()
    parent = rig.add(new_sequence(PROMPT[:-1], None))
    rig.run()
    assert parent.state is SequenceState.HELD
    children = [budgeted(seeded(30), choice_index=index) for index in range(3)]
    rig.fork(parent, children)
    rig.run()
    outputs = [rig.output(child) for child in children]
    assert outputs == [undisturbed(seeded(30), choice_index=index) for index in range(3)]
    assert len({tuple(output) for output in outputs}) == 3


@pytest.mark.parametrize(("shape", "most"), [((1, 1), 1), ((2, 1), 2), ((3, 1), 3), ((2, 2), 1)])
@pytest.mark.parametrize("opens", [(), ((2,),)])
def test_steps_in_flight_give_the_same_tokens(
    shape: tuple[int, int], most: int, opens: tuple[tuple[int, ...], ...]
) -> None:
    """Decode runs ahead where the budget forces none of the next tokens, whatever they are."""
    budget = ThinkingBudget(max_tokens=6, opens=opens, closes=((3, 4, 5),), is_open=True)

    async def scenario() -> None:
        worker = Worker(CheckedExecutor(40, shape=shape))
        sequence = budgeted(greedy(30), budget, vocab_size=SMALL_VOCAB)
        worker.add(sequence)
        worker.loop.start()
        await worker.idle()
        await worker.loop.stop()
        assert worker.executor.most_in_flight == most
        rig = Rig(vocab_size=SMALL_VOCAB)
        alone = budgeted(greedy(30), budget, vocab_size=SMALL_VOCAB)
        assert worker.tokens[sequence] == rig.complete(alone)
        assert worker.tokens[sequence][6:9] == [3, 4, 5]

    run(scenario())


# ── with a grammar ───────────────────────────────────────────────────────────────────────────────

(END,) = encode("@")
AFTER = GrammarSpec(kind="regex", source="(alpha|beta) [0-9]{3}", starts_after=((END,),))
WITHIN = GrammarSpec(kind="regex", source="é{3,30}@[0-9]{3}")


def constrained(spec: GrammarSpec, output_ids: Tokens[int] = ()) -> list[int]:
    """The tokens of a choice that may think for five tokens, after `output_ids`."""
    budget = ThinkingBudget(max_tokens=5, closes=((END,),), is_open=True)
    sampling = msgspec.structs.replace(seeded(100), grammar=spec, thinking=budget)
    sequence = new_sequence(PROMPT, sampling, output_ids=output_ids, stop=(EOS,))
    grammar = grammars_of().start(TENANT, spec, output_ids)
    vocab_size = vocabulary().vocab_size
    sequence.grammar = BudgetedOutput(budget, vocab_size, grammar, output_ids)
    return rig_of().complete(sequence)


def test_grammar_begins_after_the_forced_mark() -> None:
    free = rig_of().complete(new_sequence(PROMPT, seeded(100)))
    output = constrained(AFTER)
    assert output[:5] == free[:5]
    assert output[5] == END
    assert compiled(AFTER.kind, AFTER.source).accept(output[6:]) == len(output) - 6 > 3


def test_grammar_over_the_reasoning_completes_a_character_first() -> None:
    """Each é has two tokens, and five are the budget."""
    output = constrained(WITHIN)
    assert vocabulary().decode(output[:7]).decode() == "ééé@"
    assert compiled(WITHIN.kind, WITHIN.source).accept(output) == len(output)


@pytest.mark.parametrize("spec", [AFTER, WITHIN])
@pytest.mark.parametrize("num_before", [3, 5, 6, 8])
def test_resumed_grammar_gives_the_same_tokens(spec: GrammarSpec, num_before: int) -> None:
    straight = constrained(spec)
    before = straight[:num_before]
    assert before + constrained(spec, before) == straight


def test_what_a_grammar_waits_for_is_waited_for() -> None:
    """A mask that is late, a failure and a required start are those of the grammar."""
    threads = InlineThreads()
    threads.is_holding = True
    grammar = grammars_of(threads).start(TENANT, WITHIN)
    budget = ThinkingBudget(max_tokens=0, closes=((END,),), is_open=True)
    output = BudgetedOutput(budget, vocabulary().vocab_size, grammar)
    mask = output.mask()
    assert mask is not None and mask.wait(0.0) is None
    output.sit_out()
    assert (output.is_stalled, output.num_late_masks, output.num_free_tokens) == (True, 1, 0)
    threads.release()
    assert not output.is_stalled
    words = mask.wait(0.0)
    assert words is not None and allowed(words) == [133]
    required = grammars_of().start(TENANT, AFTER)
    assert BudgetedOutput(BUDGET, VOCAB_SIZE, required).bans_stop
    refused = grammars_of().start(TENANT, WITHIN, [END])
    assert BudgetedOutput(BUDGET, VOCAB_SIZE, refused, [END]).error is not None
