"""Alternatives of schemas, which of them have a finite value, and what they do not enforce."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.gateway.schemas.argument_text import ArgumentKinds, read, written
from services.gateway.schemas.graph import ROOT, SchemaGraph, has_no_finite_value
from services.gateway.schemas.patterns import whole
from shared.errors import GrammarTooComplex, InvalidRequest

A = {"$ref": "#/$defs/a"}


def in_a(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": A}, **fields}


ENDLESS: dict[str, Any] = {
    "required": {**A, "$defs": {"a": in_a(required=["x"])}},
    "itself": {"$ref": "#"},
    "no type": {**A, "$defs": {"a": {"properties": {"x": A}, "required": ["x"]}}},
    "two": {
        **A,
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [in_a(required=["x"])]}},
    },
    "items": {**A, "$defs": {"a": {"type": "array", "items": A, "minItems": 1}}},
    "prefix": {**A, "$defs": {"a": {"type": "array", "prefixItems": [A], "minItems": 1}}},
    "branches": {**A, "$defs": {"a": {"anyOf": [in_a(required=["x"]), {"$ref": "#"}]}}},
    "sibling": {**A, "type": "string", "$defs": {"a": {"type": "null"}}},
    "listed": {**A, "$defs": {"a": {"const": 1, "type": "string"}}},
}
FINITE: dict[str, Any] = {
    "optional": {**A, "$defs": {"a": in_a()}},
    "null": {**A, "$defs": {"a": {"anyOf": [{"type": "null"}, in_a(required=["x"])]}}},
    "items": {**A, "$defs": {"a": {"type": "array", "items": A}}},
    "unused": {"type": "string", "$defs": {"a": in_a(required=["x"])}},
    "listed": {**A, "$defs": {"a": {"const": {"x": {}}, "required": ["x"]}}},
    "elsewhere": {"$ref": "http://127.0.0.1:1/"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schema_without_a_finite_value(name: str) -> None:
    assert has_no_finite_value(ENDLESS[name])


def test_what_is_endless_is_not_empty() -> None:
    """Schemas that contradict themselves stay, so that their errors do."""
    assert {name for name in ENDLESS if SchemaGraph(ENDLESS[name]).endless([ROOT])} == {
        *("required", "no type", "two", "items", "prefix", "branches")
    }
    assert not any(
        SchemaGraph(each).endless([ROOT]) for name, each in FINITE.items() if name != "elsewhere"
    )


@pytest.mark.parametrize("name", FINITE)
def test_schema_with_a_finite_value(name: str) -> None:
    assert not has_no_finite_value(FINITE[name])


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"not": {}, "type": "string"}, ["/not"]),
        ({"properties": {"a/b": {"format": "x"}}}, ["/properties/a~1b/format"]),
        ({"type": "array", "uniqueItems": True}, ["/uniqueItems"]),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, ["/oneOf"]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, []),
        ({"oneOf": [{"const": "a"}, {"type": "string", "pattern": "^b"}]}, []),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
                    for k in "ab"
                ]
            },
            [],
        ),
        ({"format": "date", "title": "x", "default": 1, "minimum": 2, "pattern": "a"}, []),
    ],
)
def test_places_of_keywords_that_are_not_enforced(schema: Any, places: list[str]) -> None:
    assert SchemaGraph(schema).unenforced() == places


def test_bounds_of_all_schemas_are_merged() -> None:
    schema = {"type": ["integer", "null"], "minimum": 1, "allOf": [{"minimum": 3, "maximum": 9}]}
    (shape,) = SchemaGraph(schema).alternatives(ROOT)
    assert (shape.bounds, shape.is_integer) == ({"minimum": 3, "maximum": 9}, True)
    listed = {"enum": [1, 2.5, True, "a", None, 12], **schema}
    assert [each.literals for each in SchemaGraph(listed).alternatives(ROOT)] == [[None]]


def test_product_of_alternatives_is_bounded() -> None:
    pair = {"anyOf": [{"title": "a"}, {"title": "b"}]}
    with pytest.raises(GrammarTooComplex):
        SchemaGraph({"allOf": [pair] * 12}).alternatives(ROOT)
    bomb: dict[str, Any] = {"d0": {"type": "null"}}
    for index in range(1, 30):
        bomb[f"d{index}"] = {"allOf": [{"$ref": f"#/$defs/d{index - 1}"}] * 2}
    with pytest.raises(GrammarTooComplex):
        SchemaGraph({"$ref": "#/$defs/d29", "$defs": bomb}).alternatives(ROOT)


def test_work_is_bounded() -> None:
    began_at = time.process_time()
    many = [f"v{number}" for number in range(8_000)]
    SchemaGraph({"oneOf": [{"enum": many}, {"enum": many, "type": "integer"}]}).unenforced()
    assert SchemaGraph({"const": many, "items": {"enum": many}}).is_finite(ROOT)
    chain: dict[str, Any] = {
        f"d{number}": {
            **in_a(required=["x"]),
            "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}},
        }
        for number in range(4_000)
    }
    assert not has_no_finite_value({"$ref": "#/$defs/d0", "$defs": {**chain, "d4000": {}}})
    assert time.process_time() - began_at < 3  # quadratic: minutes


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"enum": 1},
        {"anyOf": {}},
        {"minLength": "2"},
        {"pattern": 1},
        {"allOf": [3]},
    ],
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        SchemaGraph(schema).alternatives(ROOT)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^ab$", "((ab))"),
        ("a", "((?s:.*)(a)(?s:.*))"),
        ("^a|[$^|]$", "((a)(?s:.*))|((?s:.*)([$^|]))"),
        ("^(a|b)", "(((a|b))(?s:.*))"),
        (r"\$", r"((?s:.*)(\$)(?s:.*))"),
        ("a^b", None),
        ("(^a)", None),
        ("a(?=b)", None),
        (r"(a)\1", None),
    ],
)
def test_expressions_of_whole_texts(pattern: str, expected: str | None) -> None:
    assert whole(pattern) == expected


def test_kinds_of_arguments() -> None:
    kinds = ArgumentKinds(
        {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}},
                {"properties": {"a": {"$ref": "#/$defs/n"}}, "additionalProperties": {"const": 1}},
            ],
            "$defs": {"n": {"type": ["integer", "null"]}},
        }
    )
    assert kinds["a"] == {"string", "integer", "null"}
    assert read("5", kinds["a"]) == 5
    assert read("none", kinds["a"]) is None
    assert written("none", kinds["a"]) == '"none"'
    assert written("x", kinds["a"]) == "x"
    assert read("true", kinds["a"]) == "true"
    assert read('{"a": 1}', ArgumentKinds({"properties": 3})["a"]) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("3.10", {"string", "integer"}, "3.10"),
        ("1e2", {"string", "integer"}, "1e2"),
        ("1e2", {"integer"}, 100),
        (" 5.0\n", {"string", "integer"}, 5),
        ("3.10", {"string", "number"}, 3.1),
        ("5.5", {"integer"}, "5.5"),
        ("true", {"integer"}, "true"),
        ("1e999", {"string", "number"}, "1e999"),  # no JSON can hold an infinity
        ("\x1c5", {"string", "number"}, "\x1c5"),
    ],
)
def test_numbers_in_texts(text: str, kinds: set[str], value: Any) -> None:
    found = read(text, frozenset(kinds))  # type: ignore[arg-type]
    assert (found, type(found)) == (value, type(value))
