"""Tools and choices as clients spell them, and which are rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.dialects.openai.chat import CHAT_FIELDS, to_generation_request
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.structured.tools.tool import CustomFormat, NamedTool, Tool, ToolOptions
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.support.grids import in_one_test

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
CLOCK = {"name": "clock", "description": "The time", "parameters": SCHEMA}
NESTED_CLOCK = {"type": "function", "function": CLOCK}
REGEX = {"syntax": "regex", "definition": "[0-9]+"}
NESTED_PATCH = {
    "type": "custom",
    "custom": {"name": "patch", "format": {"type": "grammar", "grammar": REGEX}},
}
BOTH = [NESTED_CLOCK, NESTED_PATCH]


def generation(**fields: Any) -> GenerationRequest:
    body = {"messages": [USER], **fields}
    return to_generation_request(CHAT_FIELDS.decode(msgspec.json.encode(body)), "tiny")


def options(**fields: Any) -> ToolOptions:
    found = generation(**fields).tools
    assert found is not None
    return found


def offered(**fields: Any) -> list[str]:
    """The names that the chat template is given."""
    prompt: Any = generation(**fields).prompt
    return [each["function"]["name"] for each in prompt.tools]


@pytest.mark.parametrize(
    ("spelled", "place"),
    [
        (NESTED_CLOCK, "tools[0].function.parameters"),
        ({"type": "function", **CLOCK}, "tools[0].parameters"),
        (CLOCK, "tools[0].parameters"),
    ],
)
def test_function_has_one_meaning(spelled: dict[str, Any], place: str) -> None:
    (tool,) = options(tools=[spelled]).tools
    assert tool == Tool(
        name="clock",
        description="The time",
        parameters=SCHEMA,
        param="tools[0]",
        schema_param=place,
    )
    prompt: Any = generation(tools=[spelled]).prompt
    assert prompt.tools == (NESTED_CLOCK,)


def test_function_without_parameters_has_an_object_s_schema_for_templates() -> None:
    prompt: Any = generation(tools=[{"name": "now", "strict": True}]).prompt
    (tool,) = prompt.tools
    assert tool["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert options(tools=[{"name": "now", "strict": True}]).tools[0].is_strict


@pytest.mark.parametrize(
    ("format", "place"),
    [
        ({"type": "grammar", **REGEX}, "format.definition"),
        ({"type": "grammar", "grammar": REGEX}, "format.grammar.definition"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_custom_tool_is_a_function_with_one_text(
    format: dict[str, Any], place: str, is_nested: bool
) -> None:
    patch = {"name": "patch", "format": format}
    spelled = {"type": "custom", **({"custom": patch} if is_nested else patch)}
    (tool,) = options(tools=[spelled]).tools
    assert tool.custom == CustomFormat(**REGEX)
    assert tool.schema_param == f"tools[0].{'custom.' if is_nested else ''}{place}"
    prompt: Any = generation(tools=[spelled]).prompt
    function = prompt.tools[0]["function"]
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "[0-9]+" in function["description"]


def test_a_name_with_that_of_a_server_before_it() -> None:
    name = "mcp__" + "n" * 123
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    history = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": name, "content": "1"},
    ]
    made = generation(tools=[{"name": name}], messages=[USER, *history])
    assert made.tools is not None and made.tools.tools[0].name == name


def test_choices() -> None:
    assert generation().tools is None
    assert generation(tools=[], tool_choice="auto", parallel_tool_calls=False).tools is None
    assert options(tools=BOTH).choice == "auto" and options(tools=BOTH).is_parallel
    assert not options(tools=BOTH, parallel_tool_calls=False).is_parallel
    assert options(tools=BOTH, tool_choice="required").is_forced
    for named in (
        {"type": "function", "function": {"name": "clock"}},
        {"type": "function", "name": "clock"},
    ):
        chosen = options(tools=BOTH, tool_choice=named)
        assert chosen.choice == NamedTool("clock")
        assert [each.name for each in chosen.callable_tools] == ["clock"]
    custom = {"type": "custom", "custom": {"name": "patch"}}
    assert options(tools=BOTH, tool_choice=custom).choice == NamedTool("patch")


def test_no_tool_is_shown_where_none_may_be_called() -> None:
    assert offered(tools=BOTH, tool_choice="none") == []
    assert options(tools=BOTH, tool_choice="none").callable_tools == ()


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_limit_the_calls_and_not_the_prompt(mode: str, is_flat: bool) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    inner = allowed if is_flat else {"allowed_tools": allowed}
    choice = {"type": "allowed_tools", **inner}
    chosen = options(tools=BOTH, tool_choice=choice)
    assert [each.name for each in chosen.callable_tools] == ["clock"]
    assert chosen.choice == mode
    assert offered(tools=BOTH, tool_choice=choice) == offered(tools=BOTH) == ["clock", "patch"]


NAMED = {"type": "function", "function": {"name": "other"}}


@in_one_test(
    ("fields", "param"),
    [
        ({"tools": [CLOCK, NESTED_CLOCK]}, "tools[1].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "function": CLOCK}]}, "tools[0].custom"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "x" * 129}]}, "tools[0].name"),
        ({"tools": [{"name": "f\n"}]}, "tools[0].name"),
        ({"tools": [{"name": 'f"'}]}, "tools[0].name"),
        ({"tools": [{**CLOCK, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{**CLOCK, "parameters": True}]}, "tools[0].parameters"),
        ({"tools": [{"name": f"f{index}"} for index in range(257)]}, "tools"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]},
         "tools[0].format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": "any"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": BOTH, "tool_choice": {"type": "function", "name": "patch"}},
         "tool_choice.name"),
        ({"tools": BOTH, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": BOTH, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tools": BOTH, "tool_choice": {"type": "allowed_tools", "tools": [NAMED]}},
         "tool_choice.tools[0]"),
        ({"tools": BOTH, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"functions": [CLOCK]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)  # fmt: skip
def test_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generation(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


def test_sizes_of_schemas_are_bounded() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"a": deep}
    for parameters in (deep, {"enum": [0] * 20_000}):
        with pytest.raises(PayloadTooLarge):
            generation(tools=[{"name": "f", "parameters": parameters}])
