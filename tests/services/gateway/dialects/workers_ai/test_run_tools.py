"""Tools, calls and results in the bodies of `ai/run`, as Cloudflare's clients send them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.dialects.workers_ai.model_schema import model_schema
from services.gateway.dialects.workers_ai.run_request import (
    RUN_FIELDS,
    to_generation_requests,
    without_prompts,
)
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.structured.tools.tool import NamedTool
from shared.errors import InvalidRequest

USER = {"role": "user", "content": "x"}
CLOCK = {"name": "clock", "description": "d", "parameters": {"type": "object", "properties": {}}}
NESTED_CLOCK = {"type": "function", "function": CLOCK}
ARGUMENTS = {"zone": "UTC"}


def generation(**fields: Any) -> GenerationRequest:
    body = RUN_FIELDS.decode(msgspec.json.encode(fields))
    (found,) = to_generation_requests(body, "tiny")
    return found


def messages_of(*messages: Any) -> list[Any]:
    prompt: Any = generation(messages=list(messages)).prompt
    return list(prompt.messages)


@pytest.mark.parametrize("tool", [CLOCK, NESTED_CLOCK])
@pytest.mark.parametrize("prompt", [{"messages": [USER]}, {"prompt": "x"}])
def test_both_forms_of_a_tool(tool: dict[str, Any], prompt: dict[str, Any]) -> None:
    found = generation(**prompt, tools=[tool], tool_choice={"type": "function", "name": "clock"})
    rendered: Any = found.prompt
    assert rendered.tools == (NESTED_CLOCK,)
    assert found.tools is not None and found.tools.choice == NamedTool("clock")


def test_calls_of_a_result_are_sent_back_as_they_came() -> None:
    calling = {"role": "assistant", "tool_calls": [{"name": "clock", "arguments": ARGUMENTS}]}
    _, calls, result = messages_of(USER, calling, {"role": "tool", "content": "12:00"})
    (call,) = calls["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": '{"zone":"UTC"}'}
    assert result == {
        "role": "tool",
        "content": "12:00",
        "tool_call_id": call["id"],
        "name": "clock",
    }


def test_results_without_ids_answer_open_calls_by_name_and_order() -> None:
    names = ["a", "b", "a"]
    calling = {"role": "assistant", "tool_calls": [{"name": each} for each in names]}
    results = [{"role": "tool", "name": each, "content": each} for each in ("b", "a", "a")]
    _, calls, *found = messages_of(USER, calling, *results)
    first, second, third = (each["id"] for each in calls["tool_calls"])
    assert [each["tool_call_id"] for each in found] == [second, first, third]


def test_result_of_a_call_that_was_sent_as_text() -> None:
    calling = {"role": "assistant", "content": '[{"name": "clock"}]'}
    *_, result = messages_of(USER, calling, {"role": "tool", "name": "clock", "content": "12"})
    assert result == {"role": "tool", "content": "12", "name": "clock"}


def test_result_of_an_unknown_call_is_rejected() -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages_of(USER, {"role": "tool", "tool_call_id": "x", "content": "12"})
    assert caught.value.param == "messages[1].tool_call_id"


def test_large_body_keeps_tools_and_variables() -> None:
    fields = {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"name": "clock"}]}],
        "tools": [CLOCK],
        "tool_choice": "required",
        "reasoning_effort": "low",
    }
    body = RUN_FIELDS.decode(msgspec.json.encode(fields))
    short = RUN_FIELDS.decode(msgspec.json.encode(without_prompts(body, 1)))
    (kept,) = to_generation_requests(short, "tiny")
    full = generation(**fields)
    assert (kept.tools, kept.reasoning) == (full.tools, full.reasoning)
    assert kept.tools is not None and kept.reasoning.effort == "low"


def test_schema_has_the_tools() -> None:
    shape = model_schema()["input"]
    assert {"tools", "tool_choice"} <= shape["properties"].keys()
    assert "ToolField" in shape["$defs"]
