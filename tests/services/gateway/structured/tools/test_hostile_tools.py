"""Tools that are made to hurt are refused soon, before any process is asked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.gateway.structured.grammars.answer_grammar import answer_grammar
from services.gateway.structured.tools.families import FAMILIES
from services.gateway.structured.tools.lark import in_string
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.errors import InvalidRequest


@pytest.mark.parametrize("part", ['"\\', "/\\", "<"])
def test_a_definition_that_closes_nothing_takes_linear_time(part: str) -> None:
    began_at = time.process_time()
    with pytest.raises(InvalidRequest, match="not supported"):
        in_string(part * 50_000, "tools[0]")
    assert time.process_time() - began_at < 1  # hours, if each start read to the end


@pytest.mark.parametrize("grammar", ['X: "!".."~"', 'X: "a\\n"i', 'X: "A".."z"'])
def test_what_cannot_stand_in_a_string_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        in_string(grammar, "tools[0]")


def test_definitions_do_not_multiply() -> None:
    definitions = {f"d{i}": {"type": "string", "maxLength": i} for i in range(500)}
    properties: dict[str, Any] = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(500)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    tools = ToolOptions(tools=(Tool(name="f", parameters=schema),), choice="required")
    plan = answer_grammar(None, tools, FAMILIES["qwen_xml"], lambda text: None)
    assert plan is not None and len(plan.grammar.source) < 400 * len(properties)


@pytest.mark.parametrize(
    ("family", "name", "key"),
    [
        ("pythonic", "get-weather", "a"),
        ("pythonic", "import", "a"),
        ("pythonic", "f", "from"),
        ("function_gemma", "f", "user id"),
        ("qwen_xml", "f", "a>b"),
        ("glm", "f", "a<b"),
    ],
)
def test_names_that_a_format_cannot_hold_are_refused(family: str, name: str, key: str) -> None:
    tool = Tool(name=name, parameters={"type": "object", "properties": {key: {}}})
    options = ToolOptions(tools=(tool,), choice="required")
    with pytest.raises(InvalidRequest, match="cannot hold the name"):
        answer_grammar(None, options, FAMILIES[family], lambda text: None)
    assert answer_grammar(None, options, FAMILIES["hermes"], lambda text: None) is not None
