"""The fields of all servers that constrain an output."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.request.supported_fields import SupportedFields
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.constraint_fields import ConstraintFields, constraint_of
from services.gateway.structured.grammars.json_pointers import pointers
from shared.errors import InvalidRequest
from tests.support.grids import in_one_test

FIELDS = SupportedFields(ConstraintFields, {})
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
SOURCE = '{"type":"object","properties":{"b":{},"a":{"type":"integer"}}}'
LARK, GBNF = 'start: "a"', 'root ::= "a"'


def constraint(**fields: Any) -> OutputConstraint | None:
    return constraint_of(FIELDS.decode(msgspec.json.encode(fields)))


def json_schema(param: str, **options: Any) -> OutputConstraint:
    return OutputConstraint(kind="json_schema", source=SOURCE, param=param, **options)


def of(kind: Any, source: str, param: str) -> OutputConstraint:
    return OutputConstraint(kind=kind, source=source, param=param)


@in_one_test(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, of("json_object", "", "response_format")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            json_schema("response_format.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            json_schema("response_format.json_schema.schema", is_strict=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            json_schema("response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            json_schema("response_format.json_schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            of("json_schema", "true", "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "strict": True}}},
            OutputConstraint(
                kind="json_schema",
                source=f'{SOURCE[:-1]},"strict":true}}',
                is_strict=True,
                param="response_format.json_schema",
            ),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema("structured_outputs.json")),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            json_schema("structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            json_schema("structured_outputs.json", whitespace_pattern=""),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\s?"}},
            json_schema("structured_outputs.json", whitespace_pattern=r"[ \t\n\r]?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, of("regex", "a+", "structured_outputs.regex")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            of("choice", '["a","b"]', "structured_outputs.choice"),
        ),
        ({"structured_outputs": {"grammar": LARK}}, of("lark", LARK, "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True}},
            of("json_object", "", "structured_outputs.json_object"),
        ),
        ({"guided_json": SCHEMA}, json_schema("guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, json_schema("guided_json")),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": r"[\s]{0,2}"},
            json_schema("guided_json", whitespace_pattern=r"[ \t\n\r]{0,2}"),
        ),
        ({"guided_regex": "a"}, of("regex", "a", "guided_regex")),
        ({"guided_choice": ["a", ""]}, of("choice", '["a",""]', "guided_choice")),
        ({"guided_grammar": GBNF}, of("gbnf", GBNF, "guided_grammar")),
        ({"regex": "a"}, of("regex", "a", "regex")),
        ({"ebnf": GBNF}, of("gbnf", GBNF, "ebnf")),
        ({"json_schema": json.dumps(SCHEMA)}, json_schema("json_schema")),
    ],
)
def test_spelling(fields: dict[str, Any], expected: OutputConstraint | None) -> None:
    assert constraint(**fields) == expected


@in_one_test(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "value": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": "yes"},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "title": "N", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format.json_schema.title",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": ".*"}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "guided_whitespace_pattern": "[^a]"}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar"),
        ({"json_schema": "[]"}, "json_schema"),
    ],
)
def test_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(**fields)
    assert caught.value.param == param


def test_two_constraints_are_both_named() -> None:
    with pytest.raises(InvalidRequest, match=r"guided_json.*ebnf"):
        constraint(guided_json={}, ebnf=GBNF)


def test_deep_schema_is_refused() -> None:
    nested = b'{"guided_json":' + b'{"not":' * 3000 + b"{}" + b"}" * 3001
    with pytest.raises(InvalidRequest):
        constraint_of(FIELDS.decode(nested))


def test_pointers_of_a_keyword() -> None:
    schema = {
        "not": {},
        "properties": {"not": {"not": {}}, "a/b": {"anyOf": [{}, {"not": {}}]}},
        "const": {"not": {}},
        "enum": [{"not": 1}],
        "items": {"not": {}},
    }
    assert pointers(schema, "not") == [
        "/not",
        "/properties/not/not",
        "/properties/a~1b/anyOf/1/not",
        "/items/not",
    ]
