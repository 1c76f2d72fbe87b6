"""Decode workers enforce the thinking budget of a request: alone, disaggregated, resumed."""

from __future__ import annotations

import msgspec
import pytest

from shared.engine.features import features_of
from shared.errors import InvalidRequest, WorkerUnfit
from shared.grammar.spec import GRAMMAR_FEATURE
from shared.grammar.thinking import THINKING_FEATURE, ThinkingBudget
from shared.messages import Request
from tests.services.decode.test_grammars import (
    EITHER,
    PROMPT,
    VOCAB_SIZE,
    WORDS,
    GrammarCluster,
    constrained,
    play,
)
from tests.shared.grammar.support import vocabulary
from tests.support.world.workers import EOS, request_of

CLOSE = (901, 902, 903)
BUDGET = ThinkingBudget(max_tokens=4, closes=(CLOSE,), is_open=True)


def budgeted(outputs: dict[int, list[int]] | None = None, seed: int = 5) -> Request:
    request = request_of(
        PROMPT, temperature=1.0, outputs=outputs or {0: []}, seed=seed, thinking=BUDGET
    )
    return msgspec.structs.replace(request, needs=(THINKING_FEATURE,))


def outputs_of(request: Request, candidates: tuple[str, ...] = ()) -> list[list[int]]:
    """The tokens of each choice after those that it has."""
    outputs: list[list[int]] = []

    async def test(it: GrammarCluster) -> None:
        placement_id = await it.peer.place("decode-1", request, candidates)
        for choice in request.choices:
            received = await it.peer.finished(placement_id, choice.choice_index)
            assert received.finish is not None
            assert received.finish.served.prefill_worker_id == (candidates or (None,))[0]
            outputs.append(received.output)

    play(test)
    return outputs


@EITHER
def test_marker_is_forced_after_the_budget(candidates: tuple[str, ...]) -> None:
    (output,) = outputs_of(budgeted(), candidates)
    (free,) = outputs_of(request_of(PROMPT, temperature=1.0), candidates)
    assert output[:4] == free[:4]
    assert tuple(output[4:7]) == CLOSE
    assert len(output) == 20


@EITHER
@pytest.mark.parametrize("num_before", [2, 4, 5, 6, 7, 9])
def test_resumed_output_is_the_undisturbed_one(
    num_before: int, candidates: tuple[str, ...]
) -> None:
    """Another worker goes on in the middle of reasoning, of the marker, and after both."""
    (straight,) = outputs_of(budgeted())
    before = straight[:num_before]
    (rest,) = outputs_of(budgeted({0: before}), candidates)
    assert before + rest == straight


@EITHER
def test_every_choice_has_its_own_budget(candidates: tuple[str, ...]) -> None:
    straight = outputs_of(budgeted({0: [], 1: [], 2: []}), candidates)
    assert [tuple(output[4:7]) for output in straight] == [CLOSE] * 3
    assert len({tuple(output[:4]) for output in straight}) == 3
    resumed = outputs_of(budgeted({0: [], 1: straight[1][:3], 2: straight[2][:6]}), candidates)
    assert resumed == [straight[0], straight[1][3:], straight[2][6:]]


def test_grammar_and_budget_are_enforced_together() -> None:
    """The first tokens of the grammar's output are the mark, once the budget is spent."""

    async def test(it: GrammarCluster) -> None:
        free = constrained()
        after = msgspec.structs.replace(WORDS, starts_after=(CLOSE,))
        sampling = msgspec.structs.replace(free.sampling, grammar=after, thinking=BUDGET)
        request = msgspec.structs.replace(free, sampling=sampling)
        placement_id = await it.peer.place("decode-1", request)
        received = await it.peer.finished(placement_id)
        assert tuple(received.output[4:7]) == CLOSE
        matcher = vocabulary(VOCAB_SIZE, EOS).compile(WORDS.kind, WORDS.source)
        assert matcher.accept(received.output[7:]) == len(received.output) - 7 > 5

    play(test)


def test_worker_without_a_vocabulary_has_the_feature() -> None:
    """Only grammars read the vocabulary."""
    assert THINKING_FEATURE in features_of(has_vocabulary=False)

    async def test(it: GrammarCluster) -> None:
        placement_id = await it.peer.place("decode-1", budgeted())
        assert tuple((await it.peer.finished(placement_id)).output[4:7]) == CLOSE

    play(test, features=(THINKING_FEATURE,), grammars=None)


def test_worker_without_the_feature_refuses_the_request() -> None:
    async def test(it: GrammarCluster) -> None:
        with pytest.raises(WorkerUnfit, match="decode-1 does not have thinking_budget/1"):
            await it.peer.place("decode-1", budgeted())
        assert it.decode.is_empty

    play(test, features=(GRAMMAR_FEATURE,))


def test_marker_outside_the_vocabulary_is_rejected() -> None:
    """It would fail the steps of all requests in the batch."""

    async def test(it: GrammarCluster) -> None:
        request = budgeted()
        thinking = msgspec.structs.replace(BUDGET, closes=((1, VOCAB_SIZE),))
        sampling = msgspec.structs.replace(request.sampling, thinking=thinking)
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await it.peer.place("decode-1", msgspec.structs.replace(request, sampling=sampling))
        assert it.decode.is_empty

    play(test)
