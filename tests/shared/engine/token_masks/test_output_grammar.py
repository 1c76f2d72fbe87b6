"""The masks of one choice, and what its sequence must wait for."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.token_masks.output_grammar import OutputGrammar
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.errors import GrammarFailed, GrammarReplayFailed, InvalidRequest
from shared.grammar.spec import GrammarSpec
from shared.messages import WorkerLoad
from tests.shared.engine.token_masks.support import TENANT, grammars_of
from tests.shared.grammar.support import EOS, InlineThreads, allowed, encode

OPEN = 11


@pytest.fixture
def threads() -> InlineThreads:
    return InlineThreads()


@pytest.fixture
def grammars(threads: InlineThreads) -> WorkerGrammars:
    return grammars_of(threads)


def spec_of(source: str = "(a|b)b", **fields: Any) -> GrammarSpec:
    return GrammarSpec(kind="regex", source=source, **fields)


def next_tokens(grammar: OutputGrammar) -> list[int]:
    mask = grammar.mask()
    assert mask is not None, "free"
    words = mask.wait(0.0)
    assert words is not None, "not ready"
    return allowed(words)


def accept(grammar: OutputGrammar, *token_ids: int) -> None:
    """As the engine does, which takes each mask before it samples."""
    for token_id in token_ids:
        grammar.mask()
        grammar.accept(token_id)


def counts(grammars: WorkerGrammars) -> tuple[int, int]:
    load = grammars.counted(WorkerLoad(step=1, step_budget_s=1.0))
    return load.num_late_masks, load.num_failed_grammars


def test_masks_follow_the_output(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of())
    assert encode("a")[0] in next_tokens(grammar)
    assert EOS not in next_tokens(grammar)
    accept(grammar, *encode("ab"))
    assert next_tokens(grammar) == [EOS]
    assert not grammar.is_stalled
    assert grammar.error is None


def test_free_tokens_have_no_mask(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of(starts_after=((OPEN,),), repeats=True))
    for _ in range(2):
        assert grammar.mask() is None
        accept(grammar, 30, 31)
        assert grammar.mask() is None
        accept(grammar, OPEN)
        assert EOS not in next_tokens(grammar)
        accept(grammar, *encode("bb"))
        grammar.mask()
    assert not grammar.bans_stop


def test_required_start_bans_the_end(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of(starts_after=((OPEN,),)))
    assert grammar.bans_stop
    accept(grammar, OPEN)
    assert not grammar.bans_stop


def test_masks_of_one_step_are_filled_together(
    threads: InlineThreads, grammars: WorkerGrammars
) -> None:
    each = [grammars.start(TENANT, spec_of()) for _ in range(5)]
    for grammar in each:
        grammar.mask()
    for grammar in each:
        grammar.accept(encode("a")[0])
    assert threads.num_batches == 0
    for grammar in each:
        grammar.mask()
    assert threads.num_batches == 1
    assert threads.num_slow == 1  # compiled once


def test_compiled_grammars_are_of_one_tenant(
    threads: InlineThreads, grammars: WorkerGrammars
) -> None:
    for tenant_id in ("a", "b", "a"):
        grammars.start(tenant_id, spec_of())
    grammars.start("a", spec_of("c"))
    assert threads.num_slow == 3


def test_grammar_that_is_being_compiled_is_late_and_then_stalls(
    threads: InlineThreads, grammars: WorkerGrammars
) -> None:
    ready: list[bool] = []
    grammars.on_ready(lambda: ready.append(True))
    threads.is_holding = True
    grammar = grammars.start(TENANT, spec_of())
    assert not grammar.is_stalled  # the step's forward pass may take longer
    mask = grammar.mask()
    assert mask is not None
    assert mask.wait(0.001) is None
    grammar.sit_out()
    assert grammar.is_stalled
    assert not ready
    threads.release()
    assert not grammar.is_stalled
    assert ready
    assert EOS not in next_tokens(grammar)
    assert counts(grammars) == (1, 0)


def test_wake_up_is_not_lost_when_the_mask_comes_before_it_is_awaited(
    threads: InlineThreads, grammars: WorkerGrammars
) -> None:
    ready: list[bool] = []
    grammars.on_ready(lambda: ready.append(True))
    grammar = grammars.start(TENANT, spec_of())
    grammar.sit_out()
    assert ready
    assert not grammar.is_stalled


@pytest.mark.parametrize("text", ["a", "ab"])
@pytest.mark.parametrize("before", [(), (30, OPEN)])
def test_replayed_output_continues_as_if_never_interrupted(
    grammars: WorkerGrammars, before: tuple[int, ...], text: str
) -> None:
    spec = spec_of(starts_after=((OPEN,),) if before else ())
    output = [*before, *encode(text)]
    resumed, straight = grammars.start(TENANT, spec, output), grammars.start(TENANT, spec)
    accept(straight, *output)
    assert next_tokens(resumed) == next_tokens(straight)
    assert counts(grammars) == (0, 0)


def test_replay_stalls_until_it_is_done(threads: InlineThreads, grammars: WorkerGrammars) -> None:
    """Whether the output is free is not known before."""
    threads.is_holding = True
    spec = spec_of(starts_after=((OPEN,),), repeats=True)
    output = [30, OPEN, *encode("ab"), 31]
    grammar = grammars.start(TENANT, spec, output)
    assert grammar.is_stalled
    threads.release()
    assert not grammar.is_stalled
    assert grammar.mask() is None
    assert not grammar.bans_stop


def test_replay_without_a_start_still_requires_it(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of(starts_after=((OPEN,),)), [30, 31])
    assert grammar.mask() is None
    assert grammar.bans_stop


def test_refused_replay_fails(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of(), encode("xyz"))
    assert isinstance(grammar.error, GrammarReplayFailed)
    assert not grammar.is_stalled
    grammars.record_end(grammar.error)
    assert counts(grammars) == (0, 1)


def test_token_against_the_mask_fails(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of())
    accept(grammar, *encode("x"))
    mask = grammar.mask()
    assert mask is not None
    assert mask.wait(0.0) is None
    assert isinstance(grammar.error, GrammarFailed)


def test_grammar_over_a_limit_fails_with_its_own_error(grammars: WorkerGrammars) -> None:
    grammar = grammars.start(TENANT, spec_of("a(b{1000}){1000}"))
    for _ in range(5):
        if grammar.error is None:
            accept(grammar, next_tokens(grammar)[0])
            grammar.mask()
    assert isinstance(grammar.error, GrammarFailed)
    assert "too many expressions" in grammar.error.message


def test_invalid_grammar_fails_every_choice(grammars: WorkerGrammars) -> None:
    for _ in range(2):
        assert isinstance(grammars.start(TENANT, spec_of("[")).error, InvalidRequest)


def test_nothing_is_computed_for_a_choice_that_has_ended(
    threads: InlineThreads, grammars: WorkerGrammars
) -> None:
    grammar = grammars.start(TENANT, spec_of())
    threads.is_holding = True
    accept(grammar, *encode("a"))
    grammar.mask()
    (job,) = threads.held
    del grammar
    threads.release()
    assert job.is_done
    assert job.error is not None
