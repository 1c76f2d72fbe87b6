"""Requests of the Responses API, and the conversations that they are."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.responses.fields import RESPONSES_FIELDS
from services.gateway.dialects.responses.request import to_generation_request, without_prompt
from services.gateway.dialects.responses.tools import left_out, namespaces_of
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import ChatPrompt
from services.gateway.structured.tools.tool import NamedTool
from shared.errors import HearthError
from tests.support.grids import in_one_test

CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "fs", "tools": [{**CLOCK, "name": "read"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"a":1}'}
PATCH = {"name": "patch"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12:34"}


def generation_of(**fields: Any) -> GenerationRequest:
    body = RESPONSES_FIELDS.decode(json.dumps({"input": "hi", **fields}).encode())
    return to_generation_request(body, "m")


def messages_of(**fields: Any) -> list[Any]:
    prompt = generation_of(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return [dict(each) for each in prompt.messages]


def test_text_is_the_message_of_a_user() -> None:
    assert messages_of(instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_items_become_turns_in_their_order() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {**OUTPUT, "output": [{"type": "input_text", "text": "1"}, {"type": "t", "text": "2"}]},
        {"type": "agent_message", "content": [{"type": "x", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a":1}'}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "patch", "arguments": '{"input":"x"}'},
        },
    ]
    answer = {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": calls}
    assert messages_of(input=items) == [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        answer,
        {"role": "tool", "content": "done", "tool_call_id": "c2", "name": "patch"},
        {"role": "tool", "content": "1\n2", "tool_call_id": "c1", "name": "clock"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "no"},
    ]


def test_foreign_sealed_reasoning_is_ignored() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    assert messages_of(input=[{"role": "user", "content": "a"}, sealed]) == [
        {"role": "user", "content": "a"}
    ]


LEFT_OUT: tuple[dict[str, Any], ...] = (
    {"type": "tool_search_call", "call_id": "s1", "arguments": {"query": "clock"}},
    {"type": "tool_search_output", "call_id": "s1", "status": "completed", "tools": []},
    {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "x"}},
    {"type": "local_shell_call", "call_id": "l1", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "function_call_output", "call_id": "l1", "output": "README.md"},
    {"type": "shell_call_output", "call_id": "l2", "output": [{"stdout": "a", "outcome": {}}]},
    {"type": "computer_call_output", "call_id": "l3", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_call", "name": "f", "server_label": "s", "arguments": "{}", "output": "1"},
    {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "a", "input_schema": {}}]},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}},
    {"type": "image_generation_call", "id": "i1", "result": "aGk="},
    {"type": "kind_of_tomorrow", "content": [{"type": "input_image", "image_url": "data:"}]},
    {"type": "content_of_tomorrow", "content": {}},
    {"type": "arguments_of_tomorrow", "arguments": []},
    {"type": "input_of_tomorrow", "input": {}},
    {"type": "output_of_tomorrow", "output": 5},
    {"type": "summary_of_tomorrow", "summary": ""},
    {"type": "tools_of_tomorrow", "tools": {"a": 1}, "id": 5, "call_id": "", "name": [], "role": 7},
)


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda each: each["type"])
def test_items_that_say_nothing_to_the_model_are_left_out(item: dict[str, Any]) -> None:
    call = [{"type": "local_shell_call", "call_id": "l1"}]
    before, after = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert messages_of(input=[before, *call, item, after]) == [before, after]


def test_items_that_are_left_out_are_left_out_with_their_results() -> None:
    call = {"type": "call_of_tomorrow", "call_id": "c9", "arguments": [1]}
    result = {**OUTPUT, "call_id": "c9"}
    assert messages_of(input=[call, result, {"role": "user", "content": "a"}]) == [
        {"role": "user", "content": "a"}
    ]


def test_a_later_round_may_use_the_id_of_a_call_again() -> None:
    later = {**CALL, "arguments": {"a": 2}}
    messages = messages_of(input=[CALL, OUTPUT, later, {**OUTPUT, "output": "12:35"}])
    calls = [each["tool_calls"][0]["function"]["arguments"] for each in messages[::2]]
    assert calls == ['{"a":1}', '{"a":2}']
    assert [each["content"] for each in messages[1::2]] == ["12:34", "12:35"]


def test_tools_of_items_join_those_of_the_request() -> None:
    found = {"type": "tool_search_output", "call_id": "s1", "tools": [NAMESPACE]}
    added = {"type": "additional_tools", "role": "developer", "tools": [CLOCK, {"type": "mcp"}]}
    items = [added, {"role": "user", "content": "a"}, found, {**added, "tools": [CLOCK]}]
    made = generation_of(tools=[{**CLOCK, "name": "own"}], input=items)
    assert made.tools is not None
    assert [(each.name, each.param) for each in made.tools.tools] == [
        ("own", "tools[0]"),
        ("fs__read", "input[2].tools[0].tools[0]"),
        ("clock", "input[3].tools[0]"),
    ]
    assert messages_of(tools=[CLOCK], input=items) == [{"role": "user", "content": "a"}]


def test_tools_of_items_may_be_of_newer_kinds() -> None:
    """Those of the body are chosen by its client, and refused by name."""
    tools = [CLOCK, {"type": "teleport", "speed": 9}]
    items = [{"type": "additional_tools", "tools": tools}, {"role": "user", "content": "a"}]
    body = RESPONSES_FIELDS.decode(json.dumps({"input": items}).encode())
    options = to_generation_request(body, "m").tools
    assert options is not None and [each.name for each in options.tools] == ["clock"]
    assert left_out(body.placed_tools) == (
        "input[0].tools[1]: teleport is not hosted here and is left out",
    )


def test_a_body_without_its_prompt_has_the_same_tools() -> None:
    """As a large body comes back from the process that tokenizes it."""
    brought = {"type": "additional_tools", "tools": [{"type": "web_search"}, CLOCK, NAMESPACE]}
    items = [{"role": "user", "content": "a"}, brought] * 2
    body = RESPONSES_FIELDS.decode(json.dumps({"input": items, "tools": [CLOCK]}).encode())
    short = msgspec.json.encode(without_prompt(body, b"[]"))
    decoded = RESPONSES_FIELDS.decode(short)
    options = to_generation_request(body, "m").tools
    assert options is not None and [each.name for each in options.tools] == ["clock", "fs__read"]
    assert to_generation_request(decoded, "m").tools == options
    assert namespaces_of(decoded.placed_tools) == namespaces_of(body.placed_tools)
    assert left_out(decoded.placed_tools) == (
        "input[1].tools[0]: web_search is not hosted here and is left out",
        "input[3].tools[0]: web_search is not hosted here and is left out",
    )


def test_tools_of_a_namespace_have_both_names() -> None:
    tools = [{"type": "web_search"}, NAMESPACE, CLOCK]
    options = generation_of(tools=tools).tools
    assert options is not None
    assert [(each.name, each.param, each.schema_param) for each in options.tools] == [
        ("fs__read", "tools[1].tools[0]", "tools[1].tools[0].parameters"),
        ("clock", "tools[2]", "tools[2].parameters"),
    ]
    choice = {"type": "function", "name": "read", "namespace": "fs"}
    options = generation_of(tools=tools, tool_choice=choice).tools
    assert options is not None and options.choice == NamedTool("fs__read")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, choice]}
    options = generation_of(tools=tools, tool_choice=allowed).tools
    assert options is not None and [each.name for each in options.tools] == ["fs__read"]
    assert generation_of(tools=[{"type": "web_search"}]).tools is None


def test_long_names_of_a_namespace_fit() -> None:
    tools = [{**NAMESPACE, "name": "n" * 124}, {**NAMESPACE, "name": "n" * 125}]
    options = generation_of(tools=tools).tools
    assert options is not None
    assert [len(each.name) for each in options.tools] == [128, 128]


def test_options() -> None:
    made = generation_of(
        max_output_tokens=7,
        top_logprobs=2,
        prompt_cache_key="k",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        client_metadata={"a": 1},
    )
    assert (made.max_tokens, made.num_logprobs, made.affinity_key) == (7, 2, "k")
    assert made.reasoning.effort == "low"
    assert made.output is not None and made.output.param == "text.format.schema"


SCHEMA = {"type": "json_schema", "name": "n", "schema": {}}
PARTS = [{"type": "input_image", "image_url": "data:"}]


@in_one_test(
    ("fields", "param", "status"),
    [
        ({"input": None}, "input", 400),
        ({"input": [{"role": "user", "content": PARTS}]}, "input[0].content[0]", 400),
        ({"input": [{"role": "user"}]}, "input[0].content", 400),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role", 400),
        ({"input": [OUTPUT]}, "input[0].call_id", 400),
        ({"input": [CALL, {**OUTPUT, "output": {"a": 1}}]}, "input[1].output", 400),
        (
            {"input": [{"type": "additional_tools", "tools": [PATCH, {}]}]},
            "input[0].tools[1].function",
            400,
        ),
        ({"input": [{**CALL, "name": None}]}, "input[0].name", 400),
        ({"input": [{"type": "new", "output": 5}, {**CALL, "name": 5}]}, "input[1].name", 400),
        ({"input": [{"role": "user", "content": {}}]}, "input[0].content", 400),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", 400),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", 413),
        ({"max_output_tokens": 0}, "max_output_tokens", 400),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata", 400),
        ({"background": True}, "background", 400),
        ({"conversation": "c"}, "conversation", 400),
        ({"prompt": {"id": "p"}}, "prompt", 400),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type", 400),
        ({"tools": [{"type": "mcp"}, {"type": "function", "name": "a b"}]}, "tools[1].name", 400),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", 400),
        ({"tool_choice": "required"}, "tool_choice", 400),
        ({"tools": [{"type": "namespace"}]}, "tools[0].name", 400),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", 400),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", 400),
        ({"text": {"format": SCHEMA}, "guided_regex": "a"}, "guided_regex", 400),
    ],
)
def test_bad_input_is_refused_by_name(fields: dict[str, Any], param: str, status: int) -> None:
    with pytest.raises(HearthError) as refusal:
        generation_of(**fields)
    assert (refusal.value.param, refusal.value.http_status) == (param, status), refusal.value
