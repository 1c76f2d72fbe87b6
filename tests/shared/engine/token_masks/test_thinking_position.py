"""Where an output is in its reasoning: a function of the budget and the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.token_masks.thinking_position import UNLIMITED, ThinkingPosition
from shared.grammar.thinking import ThinkingBudget

OPEN, CLOSE = 90, 91
SINGLE = ThinkingBudget(max_tokens=3, opens=((OPEN,),), closes=((CLOSE,),))
LONG = ThinkingBudget(max_tokens=2, closes=((7, 8, 9), (6, 8, 9)), is_open=True)


def forced(budget: ThinkingBudget, *output: int) -> int | None:
    return ThinkingPosition(budget, output).forced_token


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((), None),
        ((1, 2, 3, 4, 5), None),  # an answer has no budget
        ((1, OPEN, 1, 2), None),
        ((1, OPEN, 1, 2, 3), CLOSE),
        ((OPEN, 1, 2, 3, CLOSE, 4, 5), None),
        ((OPEN, 1, CLOSE, 4, 5, 6, 7), None),
        ((OPEN, 1, 2, CLOSE, OPEN, 3), CLOSE),  # reasoning of all parts counts
        ((OPEN, 1, 2, 3, CLOSE, OPEN), CLOSE),
        ((OPEN, 1, 2, 3, 4), CLOSE),  # a grammar did not allow the mark yet
        ((OPEN, OPEN, 1, 2), CLOSE),  # within reasoning it is a token like others
    ],
)
def test_single_marks(output: tuple[int, ...], expected: int | None) -> None:
    assert forced(SINGLE, *output) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((1,), None),
        ((1, 2), 7),
        ((1, 2, 7), 8),
        ((1, 2, 7, 8), 9),
        ((1, 2, 7, 8, 9), None),
        ((1, 7), 8),  # the model itself has begun
        ((1, 6), 8),  # with the other spelling
        ((7, 8), 9),
        ((7, 8, 9, 1, 2, 3), None),
        ((6, 8, 9, 1, 2, 3), None),
        ((7, 7), 8),
        ((1, 2, 7, 1), 7),
    ],
)
def test_marks_of_several_tokens(output: tuple[int, ...], expected: int | None) -> None:
    assert forced(LONG, *output) == expected


def test_budget_of_nothing() -> None:
    assert forced(ThinkingBudget(max_tokens=0, closes=((CLOSE,),), is_open=True)) == CLOSE
    closed = ThinkingBudget(max_tokens=0, opens=((OPEN,),), closes=((CLOSE,),))
    assert forced(closed, 1) is None
    assert forced(closed, 1, OPEN) == CLOSE


def test_tokens_that_are_free_whatever_they_are() -> None:
    assert ThinkingPosition(LONG, (1,)).num_free_tokens == 1
    assert ThinkingPosition(LONG, (1, 2)).num_free_tokens == 0
    assert ThinkingPosition(LONG, (7, 8, 9)).num_free_tokens == UNLIMITED
    assert ThinkingPosition(SINGLE).num_free_tokens == 4
    assert ThinkingPosition(SINGLE, (OPEN, 1, 2, 3, CLOSE)).num_free_tokens == 1


TOKENS = st.lists(st.integers(1, 5), max_size=12)
MARKS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    max_tokens=st.integers(0, 4),
    opens=MARKS.map(tuple),
    closes=MARKS.filter(bool).map(tuple),
    is_open=st.booleans(),
    drawn=TOKENS,
)
def test_any_output_is_forced_only_where_no_token_was_free(
    max_tokens: int,
    opens: tuple[tuple[int, ...], ...],
    closes: tuple[tuple[int, ...], ...],
    is_open: bool,
    drawn: list[int],
) -> None:
    """`num_free_tokens` holds, and forcing always ends the reasoning."""
    budget = ThinkingBudget(max_tokens=max_tokens, opens=opens, closes=closes, is_open=is_open)
    position = ThinkingPosition(budget)
    num_free, num_forced, output = 0, 0, []
    for token_id in drawn:
        num_free = max(num_free, position.num_free_tokens)
        token = position.forced_token
        assert token is None or num_free == 0
        num_forced = 0 if token is None else num_forced + 1
        assert num_forced <= max(map(len, closes))
        output.append(token_id if token is None else token)
        position.advance(output[-1])
        assert ThinkingPosition(budget, output).forced_token == position.forced_token
        num_free = max(0, num_free - 1)
