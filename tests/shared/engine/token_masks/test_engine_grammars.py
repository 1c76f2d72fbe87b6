"""Engines sample under grammars: the same tokens, however a sequence is scheduled."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema_rs
import pytest

from shared.engine.batching.sequence import SequenceState
from shared.engine.token_masks.mask_threads import MaskThreads
from shared.errors import GrammarFailed
from shared.grammar.spec import GrammarSpec
from tests.shared.engine.token_masks.support import WORDS, constrained, grammars_of, rig_of
from tests.shared.grammar.support import HOSTILE_REGEX, InlineThreads, compiled, vocabulary
from tests.support.engine.rig import Rig, new_sequence, prompt, seeded, solo

PROMPT = prompt(11)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}, "c": {"const": 1}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads()
    yield threads
    threads.close()


def undisturbed(spec: GrammarSpec = WORDS, **fields: int) -> list[int]:
    return rig_of().complete(constrained(PROMPT, spec, grammars_of(), **fields))


def check_complete(token_ids: list[int], spec: GrammarSpec = WORDS) -> None:
    matcher = compiled(spec.kind, spec.source)
    assert matcher.accept(token_ids) == len(token_ids)
    assert matcher.is_accepting


def run_threaded(rig: Rig, max_steps: int = 200_000) -> None:
    """With threads on threads: a step without rows waits for a mask."""
    for _ in range(max_steps):
        if not (rig.engine.batcher.waiting or rig.engine.batcher.running):
            return
        rig.step()
    raise AssertionError("a sequence does not end")


@pytest.mark.parametrize("seed", range(4))
def test_output_matches_its_grammar(seed: int) -> None:
    token_ids = undisturbed(seed=seed)
    assert 8 < len(token_ids) < 200
    check_complete(token_ids)


def test_output_of_a_schema_is_valid() -> None:
    spec = GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA))
    validator = jsonschema_rs.validator_for(SCHEMA)
    for seed in range(8):
        validator.validate(json.loads(vocabulary().decode(undisturbed(spec, seed=seed))))


def test_sequence_ends_with_stop_at_the_grammars_end() -> None:
    rig = rig_of()
    sequence = constrained(PROMPT, GrammarSpec(kind="regex", source="x"), grammars_of())
    assert rig.complete(sequence) == vocabulary().encode("x")
    assert rig.ending(sequence) == "stop"


def test_rows_without_a_grammar_are_as_ever() -> None:
    rig, grammars = rig_of(), grammars_of()
    free = [rig.add(new_sequence(prompt(5 + n), seeded(30))) for n in range(3)]
    for seed in range(3):
        rig.add(constrained(PROMPT, WORDS, grammars, seed=seed))
    rig.run()
    for number, sequence in enumerate(free):
        alone = solo(tuple(prompt(5 + number)), seeded(30), vocab_size=2048)
        assert rig.output(sequence) == alone


def test_preempted_sequence_gives_the_same_tokens() -> None:
    """The matcher is host state and stays."""
    rig, grammars = rig_of(num_blocks=26), grammars_of()
    each = [rig.add(constrained(PROMPT, WORDS, grammars, seed=seed)) for seed in range(4)]
    rig.run()
    assert sum(sequence.num_preemptions for sequence in each) > 0
    for seed, sequence in enumerate(each):
        assert rig.output(sequence) == undisturbed(seed=seed)


def test_forked_choices_give_the_same_tokens() -> None:
    rig, grammars = rig_of(), grammars_of()
    parent = rig.add(new_sequence(PROMPT[:-1], None))
    rig.run()
    assert parent.state is SequenceState.HELD
    children = [constrained(PROMPT, WORDS, grammars, choice_index=index) for index in range(4)]
    rig.fork(parent, children)
    rig.run()
    outputs = [rig.output(child) for child in children]
    assert outputs == [undisturbed(choice_index=index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) > 1


@pytest.mark.parametrize("num_before", [1, 2, 7])
def test_resumed_output_continues_with_the_same_tokens(num_before: int) -> None:
    """On another worker, whose grammar replays the output so far."""
    straight = undisturbed()
    before = straight[:num_before]
    rest = rig_of().complete(constrained(PROMPT, WORDS, grammars_of(), output_ids=before))
    assert before + rest == straight


def test_grammar_after_a_start_constrains_what_follows_it() -> None:
    plain = rig_of().complete(new_sequence(PROMPT, seeded(200)))
    start = plain[3]
    spec = GrammarSpec(kind="regex", source="abc", starts_after=((start,),))
    output = rig_of().complete(constrained(PROMPT, spec, grammars_of()))
    index = plain.index(start) + 1
    assert output[:index] == plain[:index]
    assert vocabulary().decode(output[index:]) == b"abc"


def test_threads_give_the_same_tokens(threads: MaskThreads) -> None:
    rig, grammars = rig_of(), grammars_of(threads)
    each = [rig.add(constrained(PROMPT, WORDS, grammars, seed=seed)) for seed in range(6)]
    run_threaded(rig)
    for seed, sequence in enumerate(each):
        assert rig.output(sequence) == undisturbed(seed=seed)


def test_late_mask_stalls_only_its_own_row() -> None:
    """The others go on, with the tokens that they have alone."""
    threads = InlineThreads()
    rig = rig_of()
    late = rig.add(constrained(PROMPT, WORDS, grammars_of(threads), seed=9))
    rig.step()
    threads.is_holding = True
    others = [rig.add(constrained(PROMPT, WORDS, grammars_of(), seed=seed)) for seed in range(3)]
    for _ in range(300):
        rig.step()
    assert [rig.output(other) for other in others] == [undisturbed(seed=n) for n in range(3)]
    assert len(rig.output(late)) <= 2
    assert not rig.step()  # nothing to do until the mask is there
    threads.release()
    rig.run()
    assert rig.output(late) == undisturbed(seed=9)


def test_grammar_that_fails_ends_only_its_own_sequence(threads: MaskThreads) -> None:
    rig, grammars = rig_of(), grammars_of(threads)
    hostile = GrammarSpec(kind="regex", source=HOSTILE_REGEX)
    failing = rig.add(constrained(PROMPT, hostile, grammars, max_tokens=1000))
    other = rig.add(constrained(PROMPT, WORDS, grammars))
    run_threaded(rig)
    ending = rig.endings[failing.sequence_id]
    assert ending.finish_reason == "failed"
    assert isinstance(ending.error, GrammarFailed)
    assert rig.output(other) == undisturbed()
