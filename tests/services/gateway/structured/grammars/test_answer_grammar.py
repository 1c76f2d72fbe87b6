"""Which outputs the grammar of an answer accepts, and where it applies."""

from __future__ import annotations

import json
from typing import Literal

import msgspec
import pytest

from services.gateway.structured.grammars.answer_grammar import GrammarPlan, answer_grammar
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.grammar import TokenIdOf
from services.gateway.structured.grammars.thinking import Thinking, spec_of, thinking_at_end
from services.gateway.structured.tools.families import HARMONY, HERMES, PLAIN, with_thinking
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.tool import CustomFormat, NamedTool, Tool, ToolOptions
from shared.errors import InvalidRequest
from shared.grammar.spec import MAX_SOURCE_BYTES, GrammarSpec, ReasoningMarks
from shared.grammar.vocabulary import Vocabulary
from tests.services.gateway.structured.grammars.conftest import Accepts

THINKING_HERMES = with_thinking(HERMES, "<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OBJECT = OutputConstraint(kind="json_schema", source=json.dumps(SCHEMA))
CLOCK = Tool(name="clock", parameters=SCHEMA, schema_param="tools[0].parameters")
CALL = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'


def spec(
    token_id_of: TokenIdOf,
    output: OutputConstraint | None = OBJECT,
    tools: ToolOptions | None = None,
    *,
    family: Family = THINKING_HERMES,
    thinking: Thinking = "closed",
) -> GrammarSpec:
    return spec_of(plan(token_id_of, output, tools, family), thinking, family, token_id_of)


def plan(
    token_id_of: TokenIdOf,
    output: OutputConstraint | None,
    tools: ToolOptions | None,
    family: Family = THINKING_HERMES,
) -> GrammarPlan:
    found = answer_grammar(output, tools, family, token_id_of)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("output", "accepted", "rejected"),
    [
        (OutputConstraint(kind="json_object"), ["{}", '{"b": [1, null]}'], ["[]", "1", ""]),
        (
            OBJECT,
            ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{    "a":1}'],
            ['{"a":"1"}', "{}", '{"a":1,"b":2}', '{     "a":1}', ' {"a":1}'],
        ),
        (OutputConstraint(kind="json_schema", source="true"), ["1", "{}", '"x"'], ["", "yes"]),
        (
            OutputConstraint(kind="json_schema", source="{}", whitespace_pattern=""),
            ['{"a":[1,2]}'],
            ['{"a": [1,2]}', '{"a":[1, 2]}'],
        ),
        (
            OutputConstraint(kind="json_schema", source="{}", whitespace_pattern="[ ]{0,6}"),
            ['{      "a":1}'],
            ['{\n"a":1}', '{       "a":1}'],
        ),
        (OutputConstraint(kind="regex", source="[a-c]{2}/?"), ["ab", "cc/"], ["a", "ab//"]),
        (
            OutputConstraint(kind="choice", source=json.dumps(['a"b', "a\nb\\", "\x7f é 😀", "a"])),
            ['a"b', "a\nb\\", "\x7f é 😀", "a"],
            ["", "b", "a\n", "\x7f"],
        ),
        (OutputConstraint(kind="lark", source='start: "x" y?\ny: "y"'), ["x", "xy"], ["y", "xyy"]),
    ],
)
def test_constraint(
    token_id_of: TokenIdOf,
    accepts: Accepts,
    output: OutputConstraint,
    accepted: list[str],
    rejected: list[str],
) -> None:
    """The same texts where the grammar is a part of another: after reasoning in the output."""
    found = spec(token_id_of, output)
    assert (found.starts_after, found.is_required, found.repeats) == ((), True, False)
    nested = spec(token_id_of, output, thinking="undecided")
    for text in (*accepted, *rejected):
        assert accepts(found, text) == (text in accepted), text
        assert accepts(nested, text) == (text in accepted), text
        assert accepts(nested, f"<think>a\n{{b</think>{text}") == (text in accepted), text
    assert not accepts(nested, f"<think>a{accepted[0]}")


def test_optional_part_without_an_end_is_not_offered(token_id_of: TokenIdOf) -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": endless}}
    output = OutputConstraint(kind="json_schema", source=json.dumps(schema))
    source = json.loads(plan(token_id_of, output, None).grammar.source)
    assert source["properties"] == {"x": False}


def test_reasoning_that_the_prompt_opens_ends_before_the_grammar(token_id_of: TokenIdOf) -> None:
    found = spec(token_id_of, thinking="open")
    assert found.starts_after == ((token_id_of("</think>"),),)
    assert found.is_required and found.kind == "json_schema"


@pytest.mark.parametrize("thinking", ["open", "undecided"])
def test_trigger_inside_reasoning_does_not_count(
    token_id_of: TokenIdOf, thinking: Thinking
) -> None:
    found = spec(token_id_of, None, ToolOptions(tools=(CLOCK,)), thinking=thinking)
    assert found.starts_after == ((token_id_of("<tool_call>"),),)
    opens, closes = token_id_of("<think>"), token_id_of("</think>")
    assert opens is not None and closes is not None
    assert found.reasoning == ReasoningMarks(
        opens=(opens,), closes=(closes,), is_open=thinking == "open"
    )


def test_reasoning_whose_end_is_several_tokens(token_id_of: TokenIdOf, accepts: Accepts) -> None:
    family = Family(
        name="x", call_format=None, response_template={}, think_open="[T]", think_close="[/T]"
    )
    found = spec(token_id_of, thinking="open", family=family)
    assert found.starts_after == ()
    assert accepts(found, 'so [ {"a":2} [/T]{"a":1}')
    assert not accepts(found, '{"a":1}')


@pytest.mark.parametrize(
    ("tail", "family", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", THINKING_HERMES, "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINKING_HERMES, "closed"),
        ("<think><|im_end|>\n<|im_start|>assistant\n", THINKING_HERMES, "undecided"),
        ("<|im_start|>assistant\n<think>\n", PLAIN, "closed"),
    ],
)
def test_thinking_at_the_end_of_a_prompt(tail: str, family: Family, expected: Thinking) -> None:
    assert thinking_at_end(tail, family) == expected


def test_harmony_answers_in_its_final_channel(token_id_of: TokenIdOf, accepts: Accepts) -> None:
    found = spec(token_id_of, family=HARMONY, thinking="undecided")
    analysis = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a":1}'
    assert accepts(found, final)
    assert accepts(found, analysis + final)
    assert accepts(found, f'{analysis}<|channel|>final <|constrain|>json<|message|>{{"a":1}}')
    assert not accepts(found, '{"a":1}')
    assert not accepts(found, f"{analysis}<|channel|>final<|message|>{{}}")


def test_calls_are_constrained_after_their_trigger(
    token_id_of: TokenIdOf, accepts: Accepts
) -> None:
    tools = ToolOptions(tools=(CLOCK,))
    found = spec(token_id_of, None, tools, thinking="open")
    assert found.starts_after == ((token_id_of("<tool_call>"),),)
    assert not found.is_required and found.repeats
    after = CALL.removeprefix("<tool_call>")
    assert accepts(found, after) or accepts(found, f"\n{after}")
    assert not accepts(found, after.replace("clock", "clocks"))
    assert not accepts(found, after.replace("1", '"1"'))
    assert not spec(token_id_of, None, ToolOptions(tools=(CLOCK,), is_parallel=False)).repeats


@pytest.mark.parametrize("choice", ["required", NamedTool("clock")])
def test_forced_call_is_the_whole_answer(
    token_id_of: TokenIdOf, accepts: Accepts, choice: NamedTool
) -> None:
    tools = ToolOptions(tools=(CLOCK,), choice=choice)
    for output in (None, OBJECT):
        found = spec(token_id_of, output, tools)
        assert (found.starts_after, found.is_required, found.repeats) == ((), True, False)
        assert accepts(found, CALL)
        assert not accepts(found, '{"a":1}')
        assert accepts(
            spec(token_id_of, output, tools, thinking="undecided"), f"<think></think>{CALL}"
        )


def test_constraint_or_call(token_id_of: TokenIdOf, accepts: Accepts) -> None:
    found = spec(token_id_of, OBJECT, ToolOptions(tools=(CLOCK,)))
    assert accepts(found, CALL)
    assert accepts(found, '{"a": 1}')
    assert not accepts(found, "hello")
    assert [
        each.param for each in plan(token_id_of, OBJECT, ToolOptions(tools=(CLOCK,))).parts
    ] == [
        "response_format",
        "tools[0].parameters",
    ]


def test_free_answers(token_id_of: TokenIdOf) -> None:
    none = ToolOptions(tools=(CLOCK,), choice="none")
    for output, tools, family in (
        (None, None, THINKING_HERMES),
        (None, none, THINKING_HERMES),
        (None, ToolOptions(tools=(CLOCK,)), PLAIN),
    ):
        assert answer_grammar(output, tools, family, token_id_of) is None
    with pytest.raises(InvalidRequest) as caught:
        answer_grammar(None, ToolOptions(tools=(CLOCK,), choice="required"), PLAIN, token_id_of)
    assert caught.value.param == "tool_choice"


def test_custom_tools_are_parts(token_id_of: TokenIdOf) -> None:
    tools = (
        CLOCK,
        Tool(name="note", custom=CustomFormat()),
        Tool(
            name="sum",
            custom=CustomFormat(syntax="regex", definition="["),
            schema_param="tools[2].definition",
        ),
    )
    found = plan(token_id_of, OBJECT, ToolOptions(tools=tools))
    assert found.parts[-1].param == "tools[2].definition"
    assert len(found.parts) == 3


def test_long_grammar_is_refused(token_id_of: TokenIdOf) -> None:
    source = json.dumps({"enum": ["x" * MAX_SOURCE_BYTES]})
    with pytest.raises(InvalidRequest) as caught:
        spec(token_id_of, OutputConstraint(kind="json_schema", source=source, param="guided_json"))
    assert caught.value.param == "guided_json"


def test_harmony_answers_or_calls_without_a_trigger(
    token_id_of: TokenIdOf, accepts: Accepts
) -> None:
    found = spec(token_id_of, None, ToolOptions(tools=(CLOCK,)), family=HARMONY)
    assert (found.starts_after, found.is_required) == ((), False)
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>look<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a": 1}'
    for before in ("", analysis, analysis + preamble, preamble + analysis):
        assert accepts(found, f"{before}<|channel|>final<|message|>any {{text"), before
        assert accepts(found, before + call), before
        assert not accepts(found, before + call.replace("1", "true")), before


def test_output_without_a_finite_value_is_refused(token_id_of: TokenIdOf) -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    source = json.dumps(endless)
    with pytest.raises(InvalidRequest, match="cannot be satisfied") as caught:
        spec(token_id_of, OutputConstraint(kind="json_schema", source=source, param="guided_json"))
    assert caught.value.param == "guided_json"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_tool_in_json_is_exact_or_refused(
    token_id_of: TokenIdOf, vocabulary: Vocabulary, choice: Literal["auto", "required"]
) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    tool = Tool(name="clock", parameters=parameters, is_strict=True)
    for each, is_refused in ((tool, True), (msgspec.structs.replace(tool, is_strict=False), False)):
        found = spec(token_id_of, None, ToolOptions(tools=(each,), choice=choice))
        if not is_refused:
            assert "not" in vocabulary.compile(found.kind, found.source).warnings[0]
            continue
        with pytest.raises(InvalidRequest, match="not"):
            vocabulary.compile(found.kind, found.source)
