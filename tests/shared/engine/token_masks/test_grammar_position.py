"""Where a grammar starts and ends in an output."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.token_masks.grammar_position import GrammarPosition
from shared.grammar.spec import GrammarSpec, ReasoningMarks
from tests.shared.grammar.support import EOS, allowed, compiled, encode

OPEN, FREE = 11, encode("free text")


def position_of(source: str = "(a|b)b", **fields: Any) -> GrammarPosition:
    spec = GrammarSpec(kind="regex", source=source, **fields)
    return GrammarPosition(spec, lambda: compiled("regex", source))


def next_tokens(position: GrammarPosition) -> list[int]:
    words = position.fill()
    assert words is not None, "free"
    return allowed(words)


def test_grammar_without_starts_applies_to_all_output() -> None:
    position = position_of()
    assert not position.is_free
    assert set(next_tokens(position)) >= {*encode("a"), *encode("b"), *encode("ab")}
    assert position.advance(encode("ab")) == len(encode("ab"))
    assert next_tokens(position) == [EOS]


@pytest.mark.parametrize("before", [[], FREE, [20], [20, 20], [21, 20]])
@pytest.mark.parametrize("starts_after", [((OPEN,),), ((OPEN,), (20, 21)), ((20, 20, OPEN),)])
def test_grammar_starts_after_any_of_its_starts(
    starts_after: tuple[tuple[int, ...], ...], before: list[int]
) -> None:
    """The tokens before may look like a part of a start."""
    for start in starts_after:
        position = position_of(starts_after=starts_after)
        for token_id in [*before, *start[:-1]]:
            assert position.advance([token_id]) == 1
            assert position.is_free
            assert position.fill() is None
        assert position.advance(start[-1:]) == 1
        assert not position.is_free
        assert encode("a")[0] in next_tokens(position)


def test_required_grammar_bans_the_end_until_it_starts() -> None:
    position = position_of(starts_after=((OPEN,),), is_required=True)
    assert position.bans_stop
    position.advance(FREE)
    assert position.bans_stop
    position.advance([OPEN])
    assert not position.bans_stop
    assert not position_of(starts_after=((OPEN,),), is_required=False).bans_stop
    assert not position_of().bans_stop


def test_only_the_end_follows_a_grammar_that_does_not_repeat() -> None:
    position = position_of(starts_after=((OPEN,),))
    output = [*FREE, OPEN, *encode("ab")]
    assert position.advance(output) == len(output)
    assert next_tokens(position) == [EOS]
    assert position.advance([OPEN]) == 0


def test_grammar_that_repeats_is_free_until_its_next_start() -> None:
    position = position_of(starts_after=((OPEN,),), repeats=True)
    once = [*FREE, OPEN, *encode("ab")]
    assert position.advance(once * 2) == 2 * len(once)
    assert position.is_free
    assert position.fill() is None
    assert not position.bans_stop
    position.advance([*FREE, OPEN])
    assert encode("c")[0] not in next_tokens(position)


def test_start_does_not_reach_back_into_the_grammar() -> None:
    """Its tokens are of one free part of the output."""
    last = encode("ab")[-1]
    position = position_of(starts_after=((OPEN,), (last, 20)), repeats=True)
    position.advance([OPEN, *encode("ab"), 20])
    assert position.is_free


def test_advance_stops_before_the_first_token_that_is_not_allowed() -> None:
    position = position_of(source="a+", starts_after=((OPEN,),))
    output = [*FREE, OPEN, *encode("a"), *encode("b"), *encode("a")]
    assert position.advance(output) == len(FREE) + 2


def test_no_start_counts_inside_reasoning() -> None:
    marks = ReasoningMarks(opens=(91,), closes=(92, 93), is_open=True)
    spec = GrammarSpec(kind="regex", source="a", starts_after=((90,),), reasoning=marks)
    position = GrammarPosition(spec, lambda: pytest.fail("the output is free"))
    assert position.advance([90, 5, 92, 90, 92, 93]) == 6
    assert position.is_free
    assert position.advance([7, 91, 90, 92, 93, 7]) == 6
    assert position.is_free
    position.advance([90])
    assert not position.is_free
