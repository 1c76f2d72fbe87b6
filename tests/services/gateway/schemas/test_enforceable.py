"""What llguidance cannot enforce is left out and named, or refused by keyword and place."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.schemas.enforceable import enforceable, is_regular
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.grammar import TokenIdOf, json_grammar
from services.gateway.structured.grammars.grammar_request import CheckedPlan, GrammarRequest
from services.gateway.structured.grammars.plan_checks import PlanChecks
from services.gateway.structured.tools.families import FAMILIES, PLAIN
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.errors import InvalidRequest
from shared.grammar.spec import GrammarSpec
from shared.grammar.vocabulary import Vocabulary
from tests.services.gateway.structured.grammars.conftest import (
    Accepts,
    accepts,
    token_id_of,
    tokenizer,
    vocabulary,
)
from tests.support.grids import in_one_test

__all__ = ["accepts", "token_id_of", "tokenizer", "vocabulary"]

LEAP = "2016-12-31T23:59:60"
LOCAL = "a" * 64


def warnings_of(vocabulary: Vocabulary, schema: Any, *, is_strict: bool) -> tuple[str, ...]:
    """Of a request with this schema. Raises InvalidRequest."""
    source = json.dumps(schema)
    output = OutputConstraint(kind="json_schema", source=source, is_strict=is_strict, param="p")
    checks = PlanChecks(vocabulary, PLAIN, lambda _: None)
    found = checks.check(GrammarRequest(output, b"", continues_text=False))
    assert found is not None
    return found.warnings


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "object", "properties": {"a/b": {"pattern": "^(?!x)"}}},
            "pattern: look-around|/properties/a~1b/",
        ),
        ({"items": {"pattern": r"(a)\1"}}, "pattern: look-around|at /items/pattern"),
        ({"pattern": r"\bword\b"}, "bounds of words|at /pattern"),
        ({"patternProperties": {"(?<=x)": {}}, "additionalProperties": False}, "at /patternProp"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: |at /oneOf"),
        ({"uniqueItems": True}, "not enforced: |at /uniqueItems"),
        (
            {"type": "object", "properties": {"a": {"format": "iri"}}},
            "format: iri|at /properties/a/format",
        ),
    ],
)
def test_warnings_and_refusals_name_keyword_and_place(
    vocabulary: Vocabulary, schema: Any, words: str
) -> None:
    """In our own words: those of the library name its options."""
    with pytest.raises(InvalidRequest) as refusal:
        warnings_of(vocabulary, schema, is_strict=True)
    warnings = warnings_of(vocabulary, schema, is_strict=False)
    assert refusal.value.param == "p"
    for text in (refusal.value.message, " ".join(warnings)):
        assert all(each in text for each in words.split("|")), text
        assert not any(each in text for each in ("coerce", "regex parse", "Unimplemented")), text


def checked_tool(vocabulary: Vocabulary, token_id_of: TokenIdOf, *, is_strict: bool) -> CheckedPlan:
    """Of a request that demands a call of a tool in JSON. Raises InvalidRequest."""
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "p": {"type": "string", "pattern": "^(?=a)a+$"}},
    }
    tool = Tool(name="f", parameters=parameters, is_strict=is_strict, schema_param="tools[0].p")
    tools = msgspec.json.encode(ToolOptions(tools=(tool,), choice="required"))
    found = PlanChecks(vocabulary, FAMILIES["hermes"], token_id_of).check(
        GrammarRequest(None, tools)
    )
    assert found is not None
    return found


def test_arguments_of_tools_are_written_like_outputs(
    vocabulary: Vocabulary, token_id_of: TokenIdOf, accepts: Accepts
) -> None:
    found = checked_tool(vocabulary, token_id_of, is_strict=False)
    assert [each.partition(" at ")[2] for each in found.warnings] == ["/properties/p/pattern"]
    assert found.warnings[0].startswith("tools[0].p: pattern: look-around")
    spec = GrammarSpec(kind="lark", source=found.plan.grammar.source)
    call = '<tool_call>\n{"name": "f", "arguments": {"n": %d, "p": "b"}}\n</tool_call>'
    assert accepts(spec, call % 10**18)
    assert not accepts(spec, call % 10**19)
    with pytest.raises(InvalidRequest, match=r"look-around.*at /properties/p/pattern") as refusal:
        checked_tool(vocabulary, token_id_of, is_strict=True)
    assert refusal.value.param == "tools[0].p"


def test_an_invalid_pattern_is_refused_by_place(vocabulary: Vocabulary) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "("}}
    with pytest.raises(InvalidRequest, match="pattern: invalid: unclosed group at /items/pattern"):
        warnings_of(vocabulary, schema, is_strict=False)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^[\b]$", True),
        (r"\\b(?:a)[(?=]", True),
        ("(?i)a(?P<n>b)", True),
        ("a(?!b)", False),
        (r"\\\1", False),
        ("(?<name>a)", True),
        ("(?<!a)", False),
    ],
)
def test_is_regular(pattern: str, expected: bool) -> None:
    assert is_regular(pattern) is expected


def test_other_names_stay_allowed_without_a_pattern_of_names() -> None:
    schema = {"patternProperties": {"^(?!x)": {}, "^a": {}}, "additionalProperties": False}
    found, _ = enforceable({"type": "object", **schema}, is_strict=False)
    assert found == {"type": "object", "patternProperties": {"^a": {}}}


@in_one_test(
    ("schema", "text", "is_valid"),
    [
        ({"properties": {"a": {}}}, "null", False),
        ({"properties": {"a": {"properties": {}}}}, '{"a": 1}', False),
        ({"properties": {"a": {}}, "type": ["object", "null"]}, "null", True),
        ({"properties": {"a": {}}, "enum": [None]}, "null", True),
        ({"type": "integer"}, "9" * 18, True),
        ({"type": "integer"}, "-" + "9" * 19, False),
        ({"type": "integer", "minimum": 0}, "9" * 19, False),
        ({"type": "integer", "maximum": 10**18}, str(10**18), True),
        ({"items": {"type": "integer"}, "type": "array"}, f"[{2 * 10**18}]", False),
        ({"type": ["integer", "null"]}, "9" * 19, False),
        ({"type": ["string", "integer"]}, "9" * 19, False),
        ({"type": ["integer", "null"]}, "null", True),
        ({"type": "integer", "multipleOf": 5}, "5" * 30, False),
        ({"type": "integer", "multipleOf": 10**9, "minimum": 5}, "5", False),
        ({"type": "integer", "multipleOf": 9973}, "9973", True),
        ({"type": "integer", "multipleOf": 0.5, "exclusiveMinimum": 3}, "3", False),
        ({"type": "integer", "multipleOf": 3}, "9" * 18, True),
        ({"type": ["integer", "number"]}, f"{10**19}.5", True),
        ({"type": ["string", "null"], "format": "time"}, '"12:12:60Z"', False),
        ({"type": ["string", "null"], "format": "time"}, "null", True),
        ({"type": ["integer", "null"], "format": "email"}, "7", True),
        ({"format": "date-time"}, f'"{LEAP}Z"', True),
        ({"format": "date-time"}, f'"{LEAP}.5+00:00"', True),
        ({"format": "date-time"}, f'"{LEAP}+01:00"', False),
        ({"format": "date-time"}, '"2016-12-30T23:59:60Z"', False),
        ({"format": "date-time"}, '"2016-12-30T12:12:60z"', False),
        ({"format": "date-time"}, '"2016-12-30T12:12:59-03:30"', True),
        ({"format": "time"}, '"12:12:60Z"', False),
        ({"format": "time"}, '"23:59:60Z"', True),
        ({"format": "email"}, f'"{LOCAL}@example.org"', True),
        ({"format": "email"}, f'"{LOCAL}a@example.org"', False),
        ({"format": "email"}, f'"a@{LOCAL}.org"', False),
        ({"format": "email", "allOf": [{"pattern": "^b"}]}, '"a@example.org"', False),
    ],
)
def test_values(accepts: Accepts, schema: Any, text: str, is_valid: bool) -> None:
    if "format" in schema:
        schema = {"type": "string", **schema}
    for is_strict in (True, False):
        grammar = json_grammar(schema, is_strict=is_strict)
        assert accepts(GrammarSpec(kind="json_schema", source=grammar.source), text) is is_valid
    assert bool(json_grammar(schema).warnings) == ("properties" in schema and len(schema) == 1)
