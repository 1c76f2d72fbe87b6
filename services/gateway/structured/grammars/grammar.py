"""Writes grammars in llguidance's form: of one constraint, and joined from several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from services.gateway.schemas.written_schema import written_schema
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.whitespace import DEFAULT_PATTERN
from shared.grammar.right_recursion import without_right_recursion
from shared.grammar.spec import GrammarKind

TokenIdOf = Callable[[str], int | None]  # the token of a marker that is one, else None


class Grammar(msgspec.Struct, frozen=True):
    """A grammar. GBNF becomes Lark when it is checked. `warnings` name the parts of the client's
    schema that it does not enforce.
    """

    kind: GrammarKind | Literal["gbnf"]
    source: str
    warnings: tuple[str, ...] = ()


def grammar_of(constraint: OutputConstraint) -> Grammar:
    match constraint.kind:
        case "json_object":
            return _json(constraint, {"type": "object"})
        case "json_schema":
            return _json(constraint, msgspec.json.decode(constraint.source))
        case "choice":
            return choice_grammar(msgspec.json.decode(constraint.source))
        case "lark":
            return lark_grammar(constraint.source)
        case "regex" | "gbnf" as kind:
            return Grammar(kind, constraint.source)


def _json(constraint: OutputConstraint, schema: Any) -> Grammar:
    pattern = constraint.whitespace_pattern
    return json_grammar(schema, is_strict=constraint.is_strict, whitespace_pattern=pattern)


def json_grammar(
    schema: Any, *, is_strict: bool = False, whitespace_pattern: str | None = None
) -> Grammar:
    """Returns the grammar of a schema as `written_schema` writes it, with llguidance's options at
    the root. Raises InvalidRequest if a strict schema cannot be enforced.
    """
    options: dict[str, Any] = {"lenient": not is_strict}
    if whitespace_pattern == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace_pattern or DEFAULT_PATTERN
    fields, warnings = written_schema(schema, is_strict=is_strict)
    source = msgspec.json.encode({**fields, "x-guidance": options}).decode()
    return Grammar("json_schema", source, warnings)


def lark_grammar(source: str) -> Grammar:
    return Grammar("lark", without_right_recursion(source))


def choice_grammar(choices: list[str]) -> Grammar:
    return Grammar("lark", f"start: {' | '.join(map(literal, dict.fromkeys(choices)))}")


def literal(text: str) -> str:
    """Returns the text as a string of Lark: JSON's form, except for one character."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def marker(text: str, token_id_of: TokenIdOf) -> str:
    """Returns a marker of a model's format in Lark: its token, or its text."""
    token_id = token_id_of(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def joined(start: str, name: str, grammar: Grammar, rules: str = "") -> Grammar:
    """Returns Lark with the rule `start`, in which `@name` is the given grammar. llguidance
    compiles a list of grammars into one, and names of rules are local to each grammar.
    """
    outer = {"lark_grammar": f"start: {start}\n{rules}"}
    first, *others = _list_of(grammar)
    grammars = [outer, {"name": name, **first}, *others]
    return Grammar("lark", msgspec.json.encode({"grammars": grammars}).decode())


def _list_of(grammar: Grammar) -> list[dict[str, Any]]:
    match grammar.kind:
        case "json_schema":
            return [{"json_schema": msgspec.Raw(grammar.source.encode())}]
        case "regex":
            return [{"lark_grammar": f"start: /{_in_slashes(grammar.source)}/"}]
        case _ if grammar.source.startswith("{"):
            return list(msgspec.json.decode(grammar.source)["grammars"])
        case _:
            return [{"lark_grammar": grammar.source}]


def _in_slashes(expression: str) -> str:
    """Escapes newlines and bare slashes, which would end an expression of Lark."""
    escaped, is_escaped = [], False
    for char in expression.replace("\n", "\\n"):
        escaped.append("\\/" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(escaped)
