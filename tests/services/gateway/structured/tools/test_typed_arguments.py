"""Formats of calls that are not JSON: grammar, parser and schema agree on each value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gateway.output.events import TextDelta, ToolArgumentsDelta
from services.gateway.schemas.argument_text import ArgumentKinds, written
from services.gateway.schemas.graph import ROOT, SchemaGraph
from services.gateway.structured.grammars.answer_grammar import answer_grammar
from services.gateway.structured.tools.families import FAMILIES
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.structured.tools.parsing.response_template import compiled_template
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.errors import InvalidRequest
from tests.services.gateway.structured.tools.grammar_walks import walks
from tests.services.gateway.structured.tools.schema_cases import (
    DEFINITIONS,
    arguments_schemas,
    cases,
    validator,
)
from tests.services.gateway.structured.tools.wire_formats import (
    CALLS_ONLY_FAMILIES,
    Call,
    Message,
    wire_text,
)
from tests.support.grids import in_one_test

TAGGED = ("qwen_xml", "glm")
TYPED = (*TAGGED, "pythonic", "function_gemma", "gemma4")
NAME = "get_weather"
NO_TOKENS = dict[str, int]().get


def call_text(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if name not in TAGGED:
        return wire_text(name, Message(calls=[Call(NAME, dict(arguments))]))
    kinds = ArgumentKinds(schema)
    texts = {key: written(value, kinds[key]) for key, value in arguments.items()}
    return wire_text(name, Message(calls=[Call(NAME, texts)]))


def parsed(name: str, text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    markers = MarkerTokens()
    parser = ResponseParser(
        compiled_template(FAMILIES[name].response_template, markers),
        markers,
        0,
        schemas={NAME: schema},
        call_id_of=lambda index, called: f"{called}-{index}",
    )
    events = [*parser.feed(text), *parser.finish()]
    assert not any(isinstance(each, TextDelta) and each.text.strip() for each in events), text
    assert parser.num_calls == 1, text
    (arguments,) = (each.text for each in events if isinstance(each, ToolArgumentsDelta))
    return json.loads(arguments)


def exact(value: Any) -> str:
    """`true` is not 1."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("name", TYPED)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_written_value_is_read_back(name: str, data: st.DataObject) -> None:
    schema, candidates = data.draw(arguments_schemas())
    arguments = data.draw(candidates)
    assume(validator(schema).is_valid(arguments))
    assert exact(parsed(name, call_text(name, arguments, schema), schema)) == exact(arguments)


def text_or(schema: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "string"}, schema]}


UNIONS: tuple[tuple[dict[str, Any], tuple[Any, ...]], ...] = (
    ({"type": ["string", "null"]}, (None, "nullable", "a")),
    ({"type": ["string", "boolean"]}, (True, False, "truely")),
    ({"type": ["string", "integer"]}, (5, -3, "5x", "3.10", "2026-11-24")),
    (text_or({"type": "number"}), (5, 2.5, -1e-7, "1.2.3")),
    (text_or({"type": "integer", "minimum": 2, "maximum": 90}), (5, 50, "a5")),
    (text_or({"type": "array", "items": {"type": "integer"}}), ([1, 2], [], "a[1]")),
    (text_or({"enum": [1, None, True, "b c"]}), (1, None, True, "b c", "1x")),
    ({"enum": ["a", 1, None, True, "1"]}, ("a", 1, None, True, "1")),
    ({}, (5, None, True, [1], "a")),
    ({"$ref": "#/$defs/maybe"}, (None, "a")),
)


@pytest.mark.parametrize("name", TYPED)
def test_each_value_of_a_union_can_be_written(name: str) -> None:
    """A lexer that takes the longest match finds no end of `null` where a text may go on."""
    for schema, values in UNIONS:
        root = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "$defs": {"maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
        }
        assert refused_calls(name, root, ({"a": each} for each in values)) == [], schema


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_grammar_allows_what_is_written(data: st.DataObject) -> None:
    """But for texts: those that begin as JSON must be in quotes."""
    case = data.draw(cases())
    schema = {
        "type": "object",
        "properties": {"a": text_or(case.schema)},
        "required": ["a"],
        "$defs": DEFINITIONS,
    }
    arguments = {"a": data.draw(case.values)}
    assume(not isinstance(arguments["a"], str) and validator(schema).is_valid(arguments))
    graph = SchemaGraph(schema)
    assume(graph.is_finite(ROOT) and not graph.unenforced())
    assert refused_calls("qwen_xml", schema, [arguments]) == []


def refused_calls(
    name: str, schema: dict[str, Any], arguments: Iterable[dict[str, Any]]
) -> list[str]:
    """The texts of calls that the grammar does not match."""
    walk, format = walks(has_marker_tokens=False), FAMILIES[name].call_format
    assert format is not None
    tool = Tool(name=NAME, parameters=schema, is_strict=True)
    grammar = walk.grammar(format, ToolOptions(tools=(tool,), is_parallel=False))
    texts = (call_text(name, each, schema).strip() for each in arguments)
    return [each for each in texts if not walk.matches(grammar, each)]


@pytest.mark.parametrize("name", TYPED)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_the_grammar_allows_is_valid(name: str, data: st.DataObject) -> None:
    schema, _ = data.draw(arguments_schemas())
    graph = SchemaGraph(schema)
    assume(graph.is_finite(ROOT) and not graph.unenforced())
    walk, format = walks(has_marker_tokens=False), FAMILIES[name].call_format
    assert format is not None
    tool = Tool(name=NAME, parameters=schema, is_strict=True)
    grammar = walk.grammar(format, ToolOptions(tools=(tool,), is_parallel=False))
    output = walk.walk(format, grammar, data.draw(st.integers(0, 99)))
    arguments = parsed(name, output, schema)
    assert validator(schema).is_valid(arguments), (output, arguments)


@pytest.mark.parametrize("name", TYPED)
@in_one_test(
    ("schema", "place"),
    [
        ({"type": "string", "format": "uri"}, "/properties/a/format"),
        ({"type": "string", "pattern": "a(?=b)"}, "/properties/a/pattern"),
        ({"type": "array", "uniqueItems": True}, "/properties/a/uniqueItems"),
        ({"not": {"type": "null"}}, "/properties/a/not"),
    ],
)
def test_keyword_that_a_format_cannot_enforce(name: str, schema: Any, place: str) -> None:
    """Refused for a strict tool, whatever the choice is, else named."""
    root = {"type": "object", "properties": {"a": schema}}
    tool = Tool(name=NAME, parameters=root, is_strict=True, schema_param="tools[0].parameters")
    lenient = msgspec.structs.replace(tool, is_strict=False)
    for choice in ("auto", "required"):
        with pytest.raises(InvalidRequest, match=place) as caught:
            answer_grammar(
                None, ToolOptions(tools=(tool,), choice=choice), FAMILIES[name], NO_TOKENS
            )
        assert caught.value.param == "tools[0].parameters"
        options = ToolOptions(tools=(lenient,), choice=choice)
        plan = answer_grammar(None, options, FAMILIES[name], NO_TOKENS)
        assert plan is not None
        assert plan.warnings == (f"tools[0].parameters: ignored: {place}",)


@in_one_test("name", sorted(set(FAMILIES) - {"plain"}))
def test_schema_without_finite_arguments(name: str) -> None:
    endless = {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
    tool = Tool(name=NAME, parameters={"$defs": {"a": endless}, "$ref": "#/$defs/a"})
    with pytest.raises(InvalidRequest, match="cannot be satisfied"):
        answer_grammar(None, ToolOptions(tools=(tool,)), FAMILIES[name], NO_TOKENS)


@pytest.mark.parametrize("name", TYPED)
def test_keyword_of_another_kind_is_no_reason_to_refuse(name: str) -> None:
    root = {"type": "object", "properties": {"a": {"type": "integer", "format": "int32"}}}
    tool = Tool(name=NAME, parameters=root, is_strict=True)
    plan = answer_grammar(None, ToolOptions(tools=(tool,)), FAMILIES[name], NO_TOKENS)
    assert plan is not None and plan.warnings == ()


def test_optional_argument_without_an_end_is_not_offered() -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
    root = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": endless}}
    tools = ToolOptions(tools=(Tool(name=NAME, parameters=root),), is_parallel=False)
    grammar = walks(has_marker_tokens=False).grammar("hermes", tools)
    assert '"properties":{"x":false}' in grammar


AUTO_CALLS = sorted(set(FAMILIES) - {"plain", "harmony"})


@pytest.mark.parametrize("name", AUTO_CALLS)
def test_answer_without_a_trigger_token_is_text_or_valid_calls(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = Tool(name=NAME, parameters=schema, is_strict=True)
    family, walk = FAMILIES[name], walks(has_marker_tokens=False)
    plan = answer_grammar(None, ToolOptions(tools=(tool,)), family, NO_TOKENS)
    assert plan is not None and not plan.trigger and not plan.is_required
    source = plan.grammar.source
    is_alone = name in CALLS_ONLY_FAMILIES
    for content in ("", "" if is_alone else "see {this} [f] <tag>: "):
        call = wire_text(name, Message(content, [Call(NAME, {"a": 1})]))
        assert walk.matches(source, call), call
        assert not walk.matches(source, call.replace("1", "true")), call
        assert not walk.matches(source, call.replace(NAME, "other")), call
    for text in ("", "hello", "f(1) {x} [g]", "[1] one" if name == "pythonic" else "[f(1)]"):
        assert walk.matches(source, text), text
