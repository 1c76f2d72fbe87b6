"""Where the grammar of an answer and the budget of reasoning apply in the output of a model that
thinks first. Pure.
"""

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

# Of a prompt: it ends inside reasoning, or after it, or leaves it to the model.
Thinking = Literal["open", "closed", "undecided"]

# The token sequences that spell a mark in an output, by the mark.
Spellings = Mapping[str, tuple[StartTokens, ...]]

TAIL_TOKENS = 16  # tokens of a prompt that show where it ends
_ANY_TEXT = "/(?s:.*)/"


def thinking_at_end(prompt_tail: str, family: Family) -> Thinking:
    """Returns the state of reasoning at the end of the prompt. `prompt_tail`: the last text of the
    rendered prompt, which a template wrote.
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
    """Raises InvalidRequest if the grammar is too long."""
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
    """Whether the output may open reasoning before an answer under a constraint."""
    if family.call_format == "harmony":
        return True
    marks = (family.think_open, family.think_close)
    return thinking == "undecided" and all(token_id_of(each) is not None for each in marks)


def budget_of(
    max_tokens: int, thinking: Thinking, family: Family, spellings: Spellings
) -> ThinkingBudget | None:
    """Returns None for a family that does not mark the end of reasoning."""
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
    """Of the marks of reasoning, without the white space after them, which a model may leave out.
    For `budget_of`; `spell`: of a tokenizer.
    """
    marks = (family.think_open.rstrip(), family.think_close.rstrip())
    return {mark: spell(mark) for mark in marks if mark}


def _short(mark: str, spellings: Spellings) -> tuple[StartTokens, ...]:
    found = spellings.get(mark.rstrip(), ())
    return tuple(each for each in found if len(each) <= MAX_START_TOKENS)


def _marks(thinking: Thinking, family: Family, token_id_of: TokenIdOf) -> ReasoningMarks | None:
    """Returns the marks of reasoning, which no call interrupts: a trigger within it opens none."""
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
