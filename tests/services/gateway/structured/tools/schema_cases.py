"""Random schemas of arguments with values that match them, for the formats of calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import jsonschema_rs
from hypothesis import strategies as st

# Texts that are also JSON, or nearly, or Python's words.
TEXTS = (
    "",
    "a",
    "5",
    "-1.5",
    "true",
    "None",
    "null",
    "[1",
    "[1]",
    "{}",
    '"q"',
    '"',
    " 7 ",
    "é\n😀",
    "it's",
)
LITERALS = (1, 0, -2.5, True, False, None, "1", "true", "a b", [1, "x"], {"k": None})
Values = st.SearchStrategy[Any]


class Case(NamedTuple):
    """`definitions`: the names of `$defs` that the schema refers to."""

    schema: Any
    values: Values


ANY_VALUE: Values = st.sampled_from((*TEXTS, *LITERALS))
STRING = Case({"type": "string"}, st.sampled_from(TEXTS))
LEAVES = (
    STRING,
    Case({"type": "integer"}, st.integers(-99, 99)),
    Case({"type": "number"}, st.sampled_from([0, 2.5, -3, 1e-7])),
    Case({"type": "boolean"}, st.booleans()),
    Case({"type": "null"}, st.none()),
    Case({"type": ["string", "null"]}, st.sampled_from([*TEXTS, None])),
    Case({"type": ["string", "integer"]}, st.sampled_from([*TEXTS, 5, 0])),
    Case({"type": "integer", "minimum": 2, "maximum": 12}, st.integers(2, 12)),
    Case(
        {"type": "string", "minLength": 2, "maxLength": 4}, st.sampled_from(["ab", "true", "é5😀"])
    ),
    Case({"type": "string", "pattern": "^[a-c]+$"}, st.sampled_from(["a", "abc"])),
    Case({"type": "string", "format": "date"}, st.just("2026-11-24")),
    Case({"$ref": "#/$defs/text"}, st.sampled_from(TEXTS)),
    Case({"$ref": "#/$defs/maybe"}, st.sampled_from([*TEXTS, None])),
    Case({"$ref": "#/$defs/tree"}, st.sampled_from([{"v": 1}, {"v": 2, "next": {"v": "x"}}])),
    Case({}, ANY_VALUE),
    Case(True, ANY_VALUE),
)
DEFINITIONS: dict[str, Any] = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
    "tree": {
        "type": "object",
        "properties": {"v": {"type": ["string", "integer"]}, "next": {"$ref": "#/$defs/tree"}},
        "required": ["v"],
        "additionalProperties": False,
    },
}


@st.composite
def cases(draw: st.DrawFn, depth: int = 2) -> Case:
    names = ["leaf", "const", "enum", "anyOf", "oneOf", "allOf", "array", "object", "sibling"]
    name = draw(st.sampled_from(names if depth else names[:3]))
    match name:
        case "const":
            value = draw(st.sampled_from(LITERALS))
            return Case({"const": value}, st.just(value))
        case "enum":
            values = draw(st.lists(st.sampled_from(LITERALS), min_size=1, max_size=3))
            return Case({"enum": values}, st.sampled_from(values))
        case "anyOf" | "oneOf":
            options = draw(st.lists(cases(depth - 1), min_size=1, max_size=3))
            return Case({name: [each.schema for each in options]}, st.one_of(*_values(options)))
        case "allOf":
            first = draw(cases(depth - 1))
            return Case({"allOf": [first.schema, draw(cases(0)).schema]}, first.values)
        case "sibling":
            first = draw(
                st.sampled_from([each for each in LEAVES if isinstance(each.schema, dict)])
            )
            other = draw(cases(0))
            return Case({"anyOf": [other.schema, {"type": "string"}], **first.schema}, first.values)
        case "array":
            item = draw(cases(depth - 1))
            schema = {"type": "array", "items": item.schema, "maxItems": 2}
            return Case(schema, st.lists(item.values, max_size=2))
        case "object":
            member = draw(cases(depth - 1))
            schema = {"type": "object", "properties": {"k": member.schema}, "required": ["k"]}
            schema["additionalProperties"] = False
            return Case(schema, st.fixed_dictionaries({"k": member.values}))
    return draw(st.sampled_from(LEAVES))


def _values(options: list[Case]) -> list[Values]:
    return [each.values for each in options]


def validator(schema: Any) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


@st.composite
def arguments_schemas(draw: st.DrawFn) -> tuple[dict[str, Any], st.SearchStrategy[dict[str, Any]]]:
    """The schema of a tool with the parameters `a` and `b`, and candidates of its arguments, which
    need not match.
    """
    first, second = draw(cases()), draw(cases())
    schema = {
        "type": "object",
        "properties": {"a": first.schema, "b": second.schema},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    return schema, st.fixed_dictionaries({"a": first.values}, optional={"b": second.values})
