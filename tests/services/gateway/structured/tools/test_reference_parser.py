"""Our parser of response templates beside transformers', on the same templates and outputs."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.structured.tools.families import FAMILIES
from tests.services.gateway.structured.tools.test_response_parser import parse
from tests.services.gateway.structured.tools.wire_formats import Call, Message, wire_text

MESSAGES = (
    Message("hello"),
    Message("", [Call("clock", {"s": "a", "n": 3})]),
    Message("let me see", [Call("clock", {"s": 'quo"te é😀'}), Call("get_weather", {"b": True})]),
    Message("", [Call("get_weather", {})]),
)


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "deepseek_v31", "gemma4"])
@pytest.mark.parametrize("message", MESSAGES)
def test_same_message(name: str, message: Message) -> None:
    from transformers.utils.chat_parsing import parse_response

    family, text = FAMILIES[name], wire_text(name, message)
    schema = {"n": {"type": "integer"}, "b": {"type": "boolean"}, "s": {"type": "string"}}
    parameters = {"type": "object", "properties": schema}
    tools = [
        {"type": "function", "function": {"name": each, "parameters": parameters}}
        for each in ("clock", "get_weather")
    ]
    fields = {**family.response_template["fields"], "content": {"repeats": True, "join": ""}}
    template = {**family.response_template, "fields": fields}
    expected = parse_response(text, template, prefix="", tools=tools)
    found = parse(family, list(text)).message
    assert found.content == (expected.get("content") or "").strip()
    assert [(each.name, each.arguments) for each in found.calls] == [
        _named(each) for each in expected.get("tool_calls", ())
    ]


def _named(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], call["function"]["arguments"]
