# ruff: noqa: RUF001 - markers of DeepSeek have full-width bars

from __future__ import annotations

from typing import Any, get_args

import jsonschema_rs
import msgspec
import pytest

from services.gateway.structured.tools.call_grammars import call_grammar
from services.gateway.structured.tools.family import CallFormat, Family
from services.gateway.structured.tools.tool import CustomFormat, NamedTool, Tool, ToolOptions
from shared.errors import InvalidRequest
from tests.services.gateway.structured.tools.call_bodies import read_calls
from tests.services.gateway.structured.tools.grammar_walks import walks

FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)
PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
    "required": ["lat"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "units": {"enum": ["metric", "imperial"]},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "at"],
    "$defs": {"place": PLACE},
}
TOOLS = (Tool(name="weather", parameters=WEATHER), Tool(name="clock"))
SCHEMAS = {"weather": {**WEATHER, "additionalProperties": False}, "clock": {"maxProperties": 0}}
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm": "<tool_call>clock\n</tool_call>",
    "llama_json": '{"name": "clock", "parameters": {}}',
    "pythonic": "[clock()]",
    "mistral_list": '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]clock[ARGS]{}",
    "phi_list": '<|tool_call|>[{"name": "clock", "arguments": {}}]<|/tool_call|>',
    "function_gemma": "<start_function_call>call:clock{}<end_function_call>",
    "gemma4": "<|tool_call>call:clock{}<tool_call|>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}",
}
TRIGGERS = (
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<start_function_call>",
    "<|tool_call>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
)


@pytest.mark.parametrize("format", FORMATS)
def test_random_outputs_are_valid_calls(format: CallFormat) -> None:
    """With markers as tokens, and with markers as text."""
    for has_marker_tokens, seeds in ((True, range(2)), (False, (3,))):
        walk = walks(has_marker_tokens=has_marker_tokens)
        grammar = walk.grammar(format, ToolOptions(tools=TOOLS))
        for seed in seeds:
            output = walk.walk(format, grammar, seed)
            calls = read_calls(format, output)
            assert calls, output
            for name, arguments in calls:
                assert jsonschema_rs.is_valid(SCHEMAS[name], arguments), output


@pytest.mark.parametrize("format", FORMATS)
def test_only_known_names_and_one_call_unless_parallel(format: CallFormat) -> None:
    walk, call = walks(), ONE_CALL[format]
    grammar = walk.grammar(format, ToolOptions(tools=TOOLS, is_parallel=False))
    assert walk.matches(grammar, call)
    assert not walk.matches(grammar, call.replace("clock", "clocks"))
    assert not walk.matches(grammar, call.replace("clock", "cloc"))
    assert not walk.matches(grammar, call.replace("clock", "weather"))  # lacks its arguments
    assert all(len(read_calls(format, walk.walk(format, grammar, seed))) == 1 for seed in range(2))
    chosen = ToolOptions(tools=TOOLS, choice=NamedTool("weather"))
    assert not walk.matches(walk.grammar(format, chosen), call)


@pytest.mark.parametrize("format", [each for each in FORMATS if each != "harmony"])
def test_after_the_trigger_the_rest_of_the_call_follows(format: CallFormat) -> None:
    walk, call = walks(), ONE_CALL[format]
    trigger = next((each for each in TRIGGERS if call.startswith(each)), "")
    grammar = walk.grammar(format, ToolOptions(tools=TOOLS), after_trigger=True)
    assert walk.matches(grammar, call.removeprefix(trigger))
    assert not trigger or not walk.matches(grammar, call)


def test_no_grammar_without_calls() -> None:
    plain = Family(name="plain", call_format=None, response_template={})
    options = ToolOptions(tools=TOOLS)
    assert call_grammar(plain, options, {}.get, after_trigger=False) is None
    hermes = msgspec.structs.replace(plain, call_format="hermes")
    off = ToolOptions(tools=TOOLS, choice="none")
    assert call_grammar(hermes, off, {}.get, after_trigger=False) is None


@pytest.mark.parametrize("format", FORMATS)
def test_text_input_of_a_custom_tool(format: CallFormat) -> None:
    walk = walks()
    tool = Tool(name="shell", custom=CustomFormat())
    options = ToolOptions(tools=(tool,), is_parallel=False)
    output = walk.walk(format, walk.grammar(format, options), 3)
    [(name, arguments)] = read_calls(format, output)
    assert name == "shell" and list(arguments) == ["input"] and isinstance(arguments["input"], str)


@pytest.mark.parametrize(
    ("custom", "matching", "other"),
    [
        (CustomFormat(syntax="regex", definition="[a-z]+/[0-9]"), "ab/1", "ab1"),
        (CustomFormat(syntax="regex", definition="."), "a", '\\"'),  # only what needs no escape
        (
            CustomFormat(
                syntax="lark", definition='start: "say" " \\"" W "\\"" // C\nW: /[a-z]{1,4}/'
            ),
            'say \\"hi\\"',
            'say "hi"',
        ),
    ],
)  # fmt: skip
def test_constrained_input_of_a_custom_tool(
    custom: CustomFormat, matching: str, other: str
) -> None:
    walk = walks()
    options = ToolOptions(tools=(Tool(name="shell", custom=custom),))
    grammar = walk.grammar("hermes", options)
    call = '<tool_call>{"name": "shell", "arguments": {"input": "INPUT"}}</tool_call>'
    assert walk.matches(grammar, call.replace("INPUT", matching))
    assert not walk.matches(grammar, call.replace("INPUT", other))
    for format in FORMATS:
        assert walk.walk(format, walk.grammar(format, options), 1)


def test_long_input_of_a_recursive_grammar() -> None:
    custom = CustomFormat(syntax="lark", definition='start: "," next | "a"\nnext: start')
    options = ToolOptions(tools=(Tool(name="shell", custom=custom),))
    for format, text in (
        ("hermes", '<tool_call>{"name": "shell", "arguments": {"input": "INPUT"}}</tool_call>'),
        ("mistral_list", '[TOOL_CALLS][{"name": "shell", "arguments": {"input": "INPUT"}}]'),
    ):
        grammar = walks().grammar(format, options)
        assert walks().matches(grammar, text.replace("INPUT", "," * 2500 + "a")), format


@pytest.mark.parametrize(
    "definition",
    ['start: X\nX: ~"a"', "start: <[3]>", "start: %json {}"],
)
def test_input_that_cannot_stand_in_a_string_is_rejected(definition: str) -> None:
    custom = CustomFormat(syntax="lark", definition=definition)
    options = ToolOptions(
        tools=(Tool(name="shell", custom=custom, schema_param="tools[4].format.definition"),)
    )
    with pytest.raises(InvalidRequest, match=r"tools\[4\]\.format\.definition"):
        walks().grammar("hermes", options)
