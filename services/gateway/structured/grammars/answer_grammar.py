"""Builds the grammar of an answer from its constraint, its tool calls, or either. No I/O.

constraint │ tool choice │ grammar                                  │ applies
───────────┼─────────────┼──────────────────────────────────────────┼────────────────────────────
yes        │ no tools    │ the constraint's                         │ from the first token
no         │ auto        │ what follows the family's trigger token, │ after each trigger
           │             │ or without one: free text, or the calls  │ from the first token
no, yes    │ forced      │ the call, or the calls                   │ from the first token
yes        │ auto        │ the constraint's, or the calls           │ from the first token
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from services.gateway.schemas.graph import NO_FINITE_VALUE, has_no_finite_value, has_references
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.grammar import (
    Grammar,
    TokenIdOf,
    grammar_of,
    joined,
    json_grammar,
    lark_grammar,
    literal,
    marker,
)
from services.gateway.structured.tools.call_grammars import LarkRules, call_grammar
from services.gateway.structured.tools.family import CallFormat, Family
from services.gateway.structured.tools.lark import in_slashes
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.errors import InvalidRequest

# Formats whose trigger opens one call. The trigger of other formats opens all calls of an answer.
_TRIGGER_PER_CALL: frozenset[CallFormat] = frozenset(
    ("hermes", "qwen_xml", "glm", "mistral_args", "function_gemma", "gemma4")
)


class GrammarPart(msgspec.Struct, frozen=True):
    """A grammar or schema of the client. `param` is its request field."""

    param: str
    grammar: Grammar


class GrammarPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of an answer. It applies after the tokens `trigger` or, if they are empty, from
    the first token after the reasoning. `parts` are the client's grammars, for errors; an error
    that is in none of them names `param`. `warnings` name keywords of the tools' schemas that a
    grammar without JSON does not enforce.
    """

    grammar: Grammar
    trigger: tuple[int, ...] = ()
    is_required: bool = True
    repeats: bool = False
    parts: tuple[GrammarPart, ...]
    param: str
    warnings: tuple[str, ...] = ()


def answer_grammar(
    output: OutputConstraint | None,
    tools: ToolOptions | None,
    family: Family,
    token_id_of: TokenIdOf,
) -> GrammarPlan | None:
    """Returns the plan, or None if the answer is unconstrained. Raises InvalidRequest if a call is
    required of a model that calls no tools, if a strict schema cannot be enforced, or if no value
    matches a schema.
    """
    offered = None if tools is None or tools.choice == "none" else tools
    if offered is not None and offered.is_forced:
        return _forced(offered, family, token_id_of)
    if output is None:
        return None if offered is None else _triggered(offered, family, token_id_of)
    return _constrained(output, offered, family, token_id_of)


def _constrained(
    output: OutputConstraint, tools: ToolOptions | None, family: Family, token_id_of: TokenIdOf
) -> GrammarPlan:
    _check_finite(output)
    part = _part(output.param, lambda: grammar_of(output))
    prefix = _final_channel(token_id_of) if family.call_format == "harmony" else ""
    rules = None
    if tools is not None:
        rules = call_grammar(family, tools, token_id_of, after_trigger=False)
    if tools is None or rules is None:
        grammar = joined(f"{prefix}@constraint", "constraint", part.grammar)
        grammar = grammar if prefix else part.grammar
        return GrammarPlan(grammar=grammar, parts=(part,), param=part.param)
    start = f"{prefix}@constraint | {rules.start}"
    return GrammarPlan(
        grammar=joined(start, "constraint", part.grammar, rules.rules),
        parts=(part, *_tool_parts(tools)),
        param=part.param,
        warnings=rules.warnings,
    )


def _check_finite(output: OutputConstraint) -> None:
    if output.kind != "json_schema":
        return
    schema = msgspec.json.decode(output.source)
    if has_references(schema) and has_no_finite_value(schema):
        raise InvalidRequest(f"{output.param}: {NO_FINITE_VALUE}", param=output.param)


def _final_channel(token_id_of: TokenIdOf) -> str:
    """Returns the text that precedes an answer in harmony."""
    channel, constrain, message = (
        marker(f"<|{each}|>", token_id_of) for each in ("channel", "constrain", "message")
    )
    return f'{channel} "final" (" "? {constrain} "json")? {message} '


def _forced(tools: ToolOptions, family: Family, token_id_of: TokenIdOf) -> GrammarPlan:
    rules = call_grammar(family, tools, token_id_of, after_trigger=False)
    if rules is None:
        raise InvalidRequest("tool_choice: this model calls no tools", param="tool_choice")
    return GrammarPlan(
        grammar=_lark(rules), parts=_tool_parts(tools), param="tools", warnings=rules.warnings
    )


def _triggered(tools: ToolOptions, family: Family, token_id_of: TokenIdOf) -> GrammarPlan | None:
    trigger = token_id_of(family.trigger) if family.trigger else None
    if trigger is None:
        return _text_or_calls(tools, family, token_id_of)
    rules = call_grammar(family, tools, token_id_of, after_trigger=True)
    if rules is None:
        return None
    return GrammarPlan(
        grammar=_lark(rules),
        trigger=(trigger,),
        is_required=False,
        repeats=tools.is_parallel and family.call_format in _TRIGGER_PER_CALL,
        parts=_tool_parts(tools),
        param="tools",
        warnings=rules.warnings,
    )


def _text_or_calls(
    tools: ToolOptions, family: Family, token_id_of: TokenIdOf
) -> GrammarPlan | None:
    """Returns rules for a format whose calls no token opens: text that is not read as a call, or
    calls.
    """
    after_trigger = bool(family.trigger)
    rules = call_grammar(family, tools, token_id_of, after_trigger=after_trigger)
    if rules is None:
        _check_no_strict(tools, family)
        return None
    start, text_rules = _with_text(family, rules.start, token_id_of, tools.is_parallel)
    return GrammarPlan(
        grammar=Grammar("lark", f"start: {start}\n{text_rules}\n{rules.rules}"),
        is_required=False,
        parts=_tool_parts(tools),
        param="tools",
        warnings=rules.warnings,
    )


def _check_no_strict(tools: ToolOptions, family: Family) -> None:
    """Raises InvalidRequest for strict tools in an operator's format of calls, for which there is
    no grammar.
    """
    strict = next((each for each in tools.callable_tools if each.is_strict), None)
    if strict is not None and "tool_calls" in family.response_template.get("fields", {}):
        param = f"{strict.param}.function.strict"
        raise InvalidRequest(f"{param}: this model's calls cannot be constrained", param=param)


def _with_text(
    family: Family, calls: str, token_id_of: TokenIdOf, is_parallel: bool
) -> tuple[str, str]:
    """Returns the start rule and its rules, for text or `calls`. `calls` is a rule for the calls
    or, if the family has a trigger, for what follows the trigger.
    """
    if family.call_format == "harmony":
        channel, message, end, begin = (
            marker(f"<|{each}|>", token_id_of) for each in ("channel", "message", "end", "start")
        )
        preamble = f'{channel} "commentary" {message} TEXT {end} {begin} "assistant"'
        analysis = f'{channel} "analysis" {message} TEXT {end} {begin} "assistant"'
        final = f"{_final_channel(token_id_of)} TEXT"
        return f"(({preamble}) | ({analysis}))* (({final}) | {calls})", "TEXT: /(?s:.*)/"
    if family.trigger:
        trigger = in_slashes(re.escape(family.trigger))[1:-1]
        again = "*" if is_parallel and family.call_format in _TRIGGER_PER_CALL else "?"
        return f"(BEFORE {calls}){again} AFTER", (
            f"BEFORE: AFTER {literal(family.trigger)}\n"
            f"AFTER: /(?s:.*)/ & ~/(?s:.*){trigger}(?s:.*)/"
        )
    python_tag = r"<\|python_(tag|start)\|>"
    if family.call_format == "llama_json":
        return f"TEXT | {calls}", rf"TEXT: /(?s:.*)/ & ~/\s*({python_tag}\s*)?\{{(?s:.*)/"
    # The lexer takes the longest match: text and calls must differ in their first character.
    return f'TEXT | "[" REST | {calls}', (
        rf"TEXT: /(?s:.*)/ & ~/\s*({python_tag}\s*)?\[(?s:.*)/"
        "\n"
        r"REST: /(?s:.*)/ & ~/\s*[A-Za-z_][a-zA-Z0-9_.]*\((?s:.*)/"
    )


def _lark(rules: LarkRules) -> Grammar:
    return Grammar("lark", f"start: {rules.start}\n{rules.rules}")


def _tool_parts(tools: ToolOptions) -> tuple[GrammarPart, ...]:
    parts = (_tool_part(each) for each in tools.callable_tools)
    return tuple(each for each in parts if each is not None)


def _tool_part(tool: Tool) -> GrammarPart | None:
    if tool.custom is None:
        return _part(
            tool.schema_param, lambda: json_grammar(tool.parameters, is_strict=tool.is_strict)
        )
    if tool.custom.syntax == "text":
        return None
    syntax, definition = tool.custom.syntax, tool.custom.definition
    if syntax == "regex":
        return GrammarPart(tool.schema_param, Grammar(syntax, definition))
    return _part(tool.schema_param, lambda: lark_grammar(definition))


def _part(param: str, make: Callable[[], Grammar]) -> GrammarPart:
    """Returns a part of the grammar. Raises InvalidRequest with the field's name."""
    try:
        return GrammarPart(param, make())
    except InvalidRequest as error:
        raise type(error)(f"{param}: {error.message}", param=param) from error
