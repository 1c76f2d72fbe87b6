"""The grammar of one constraint, as llguidance takes it."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.grammars.constraint import OutputConstraint
from services.gateway.grammars.whitespace import DEFAULT_PATTERN
from shared.grammar.spec import GrammarKind

SourceKind = GrammarKind | str


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """`kind`: `gbnf` is converted to Lark by the check."""

    kind: str
    source: str


def grammar_of(constraint: OutputConstraint) -> Grammar:
    match constraint.kind:
        case "json_object":
            return Grammar("json_schema", json_grammar({"type": "object"}, constraint))
        case "json_schema":
            schema = msgspec.json.decode(constraint.source)
            return Grammar("json_schema", json_grammar(schema, constraint))
        case "choice":
            return Grammar("lark", choice_grammar(msgspec.json.decode(constraint.source)))
        case "regex" | "lark" | "gbnf" as kind:
            return Grammar(kind, constraint.source)


def json_grammar(schema: Any, constraint: OutputConstraint) -> str:
    """The schema without whitespace, with llguidance's options at its root."""
    pattern = constraint.whitespace_pattern
    options: dict[str, Any] = {"lenient": not constraint.is_strict}
    if pattern == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = DEFAULT_PATTERN if pattern is None else pattern
    fields = {} if schema is True else schema
    return msgspec.json.encode({**fields, "x-guidance": options}).decode()


def choice_grammar(choices: list[str]) -> str:
    """Lark whose strings are JSON's."""
    texts = (msgspec.json.encode(each).decode() for each in dict.fromkeys(choices))
    return f"start: {' | '.join(texts)}"
