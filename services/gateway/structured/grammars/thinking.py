"""Decides where the grammar and the reasoning budget apply in a reasoning model's output. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from services.gateway.structured.grammars.answer_grammar import GrammarPlan
from services.gateway.structured.grammars.grammar import Grammar, TokenIdOf, joined, literal, marker
from services.gateway.structured.tools.family import Family
from shared.errors import InvalidRequest
from shared.grammar.spec import (
    MAX_SOURCE_BYTES,
    MAX_START_TOKENS,
    GrammarSpec,
    ReasoningMarks,
    StartTokens,
)
from shared.grammar.thinking import ThinkingBudget

# Whether a prompt ends inside reasoning, after it, or leaves it to the model.
Thinking = Literal["open", "closed", "undecided"]

# The token sequences that are decoded as a mark, by mark.
Spellings = Mapping[str, tuple[StartTokens, ...]]

TAIL_TOKENS = 16  # tokens of a prompt that show where it ends
_ANY_TEXT = "/(?s:.*)/"


def thinking_at_end(prompt_tail: str, family: Family) -> Thinking:
    """Returns the state at the end of a rendered prompt. `prompt_tail` is its last text, which a
    template wrote.
    """
    if not family.think_close:
        return "closed"
    tail = prompt_tail.rstrip()
    if tail.endswith(family.think_close.rstrip()):
        return "closed"
    if family.think_open and tail.endswith(family.think_open.rstrip()):
        return "open"
    return "undecided"


def spec_of(
    plan: GrammarPlan, thinking: Thinking, family: Family, token_id_of: TokenIdOf
) -> GrammarSpec:
    """Returns the grammar for the worker. Raises InvalidRequest if it is too long."""
    grammar = plan.grammar
    if plan.trigger:
        marks = _marks(thinking, family, token_id_of)
        return _spec(plan, grammar, starts_after=(plan.trigger,), reasoning=marks)
    if family.call_format == "harmony":
        start = f"{_analysis(token_id_of)}* @answer"
        return _spec(plan, joined(start, "answer", grammar))
    if thinking == "closed":
        return _spec(plan, grammar)
    opening, close = token_id_of(family.think_open), token_id_of(family.think_close)
    if thinking == "open":
        if close is not None:
            return _spec(plan, grammar, starts_after=((close,),))
        rule = f"thinking[suffix={literal(family.think_close)}]: {_ANY_TEXT}"
        return _spec(plan, joined("thinking @answer", "answer", grammar, rule))
    if not opens_reasoning(thinking, family, token_id_of):
        return _spec(plan, grammar)
    start = f"(<[{opening}]> {_ANY_TEXT} <[{close}]>)? @answer"
    return _spec(plan, joined(start, "answer", grammar))


def opens_reasoning(thinking: Thinking, family: Family, token_id_of: TokenIdOf) -> bool:
    """Whether the output may open reasoning before a constrained answer."""
    if family.call_format == "harmony":
        return True
    marks = (family.think_open, family.think_close)
    return thinking == "undecided" and all(token_id_of(each) is not None for each in marks)


def budget_of(
    max_tokens: int, thinking: Thinking, family: Family, spellings: Spellings
) -> ThinkingBudget | None:
    """Returns the budget of reasoning, or None for a family that does not mark the end of
    reasoning.
    """
    closes = _short(family.think_close, spellings)
    if not closes:
        return None
    return ThinkingBudget(
        max_tokens=max_tokens,
        closes=closes,
        opens=_short(family.think_open, spellings),
        is_open=thinking == "open",
    )


def mark_spellings(family: Family, spell: Callable[[str], tuple[StartTokens, ...]]) -> Spellings:
    """Returns the token sequences of the marks of reasoning, without trailing whitespace, which a
    model may omit. `spell` returns a tokenizer's sequences of a text.
    """
    marks = (family.think_open.rstrip(), family.think_close.rstrip())
    return {mark: spell(mark) for mark in marks if mark}


def _short(mark: str, spellings: Spellings) -> tuple[StartTokens, ...]:
    found = spellings.get(mark.rstrip(), ())
    return tuple(each for each in found if len(each) <= MAX_START_TOKENS)


def _marks(thinking: Thinking, family: Family, token_id_of: TokenIdOf) -> ReasoningMarks | None:
    """Returns the marks of reasoning, inside which a trigger opens no call, or None."""
    opening, close = token_id_of(family.think_open), token_id_of(family.think_close)
    if close is None:
        return None
    opens = () if opening is None else (opening,)
    return ReasoningMarks(opens=opens, closes=(close,), is_open=thinking == "open")


def _analysis(token_id_of: TokenIdOf) -> str:
    """Returns the rule of a message of reasoning in harmony, and of the start of the next one."""
    channel, message, end, start = (
        marker(f"<|{name}|>", token_id_of) for name in ("channel", "message", "end", "start")
    )
    return f'({channel} "analysis" {message} {_ANY_TEXT} {end} {start} "assistant")'


def _spec(
    plan: GrammarPlan,
    grammar: Grammar,
    *,
    starts_after: tuple[tuple[int, ...], ...] = (),
    reasoning: ReasoningMarks | None = None,
) -> GrammarSpec:
    num_bytes = len(grammar.source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"{plan.param}: the grammar has {num_bytes} bytes, the limit is {MAX_SOURCE_BYTES}",
            param=plan.param,
        )
    assert grammar.kind != "gbnf", "a checked plan has Lark"
    return GrammarSpec(
        kind=grammar.kind,
        source=grammar.source,
        starts_after=starts_after,
        is_required=plan.is_required,
        repeats=plan.repeats,
        reasoning=reasoning,
    )
