"""Histories with calls, results and reasoning, and the variables of a client, as messages of chat
templates; a large body as a small one.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.openai.chat import CHAT_FIELDS, to_generation_request
from services.gateway.dialects.openai.dialect import CHAT
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prepared_bodies import prepare_body, with_prompts
from services.gateway.request.prompt import PackedPrompt
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob
from shared.errors import InvalidRequest
from shared.packing import unpack_token_ids
from tests.support.grids import in_one_test

USER = {"role": "user", "content": "What time is it?"}
FUNCTION = {"name": "clock", "arguments": '{"zone": "UTC"}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
TOOL = {"type": "function", "function": {"name": "clock"}}


def generation(**fields: Any) -> GenerationRequest:
    body = {"messages": [USER], **fields}
    return to_generation_request(CHAT_FIELDS.decode(msgspec.json.encode(body)), "tiny")


def messages_of(*messages: Any) -> list[Any]:
    prompt: Any = generation(messages=list(messages)).prompt
    return list(prompt.messages)


def test_calls_and_results() -> None:
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": "00"}]
    found = messages_of(USER, CALLING, RESULT, {**RESULT, "content": parts})
    assert found == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "12:00"},
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "12\n00"},
    ]
    assert generation(messages=[USER, CALLING, RESULT]).prompt.num_calls == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("", "{}"), (None, "{}"), ({"a": [1]}, '{"a":[1]}'), (' {"a" : 1} ', ' {"a" : 1} ')],
)
def test_arguments_are_json_text(arguments: Any, text: str) -> None:
    call = {**CALL, "function": {"name": "clock", "arguments": arguments}}
    (_, message) = messages_of(USER, {**CALLING, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_calls_and_results_in_their_older_form() -> None:
    calling = {"role": "assistant", "content": None, "function_call": FUNCTION}
    result = {"role": "function", "name": "clock", "content": "12:00"}
    _, call, found = messages_of(USER, calling, result)
    assert call["tool_calls"][0]["function"] == FUNCTION
    assert found["tool_call_id"] == call["tool_calls"][0]["id"]
    assert (found["role"], found["name"], found["content"]) == ("tool", "clock", "12:00")


def test_custom_call_is_a_call_with_one_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    (_, message) = messages_of(USER, {**CALLING, "tool_calls": [call]})
    function = message["tool_calls"][0]["function"]
    assert function["name"] == "patch"
    assert msgspec.json.decode(function["arguments"]) == {"input": 'a "b"'}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_one_name_for_templates(name: str) -> None:
    (_, message) = messages_of(USER, {"role": "assistant", "content": "4", name: "2 + 2"})
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}


def test_refusal_is_text_if_there_is_one() -> None:
    for refusal, text in ((None, ""), ("no", "no")):
        (_, message) = messages_of(USER, {"role": "assistant", "refusal": refusal})
        assert message["content"] == text
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    (_, message) = messages_of(USER, {"role": "assistant", "content": parts})
    assert message["content"] == "a\nno"


def test_parts_as_the_responses_api_spells_them() -> None:
    """Agents that speak both APIs send them to either."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    (message,) = messages_of({"role": "user", "content": [{"text": "0"}, *parts]})
    assert message["content"] == "0\na\nb"


@pytest.mark.parametrize("kind", ["input_audio", "file", "thinking"])
def test_other_parts_are_refused_by_their_kind(kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(InvalidRequest, match=f"this model reads no '{kind}', only text") as caught:
        generation(messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "must be a data URL"),
        ({"type": "image_url", "image_url": "ftp://a/b"}, "must be a data URL"),
        ({"type": "input_image"}, "needs an `image_url`"),
        ({"type": "image", "image": "data:"}, "is a part of the type 'image_url'"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "fine"}}, "detail must be"),
    ],
)
def test_a_part_that_shows_no_image_is_named(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        generation(messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]"


def test_an_empty_name_of_a_model_is_none() -> None:
    assert generation(model="").model == generation(model=None).model == "tiny"


def test_variables_of_the_template() -> None:
    prompt: Any = generation(
        reasoning_effort="none", chat_template_kwargs={"thinking_budget": 5}
    ).prompt
    assert prompt.variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
        "thinking_budget": 5,
    }
    high: Any = generation(reasoning_effort="high", include_reasoning=False)
    assert high.prompt.variables == {"reasoning_effort": "high"}
    assert (high.reasoning.effort, high.reasoning.is_shown) == ("high", False)
    assert generation(verbosity="medium").reasoning.is_shown


@in_one_test(
    ("fields", "param"),
    [
        ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [USER, RESULT, CALLING]}, "messages[1].tool_call_id"),
        ({"messages": [USER, CALLING, {**RESULT, "tool_call_id": "x"}]},
         "messages[2].tool_call_id"),
        ({"messages": [USER, CALLING, {"role": "tool", "content": "x"}]},
         "messages[2].tool_call_id"),
        ({"messages": [{**USER, "tool_call_id": "call_1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [USER, CALLING, {**RESULT, "content": None}]}, "messages[2].content"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"messages": [{**USER, "function_call": FUNCTION}]}, "messages[0].function_call"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{**CALLING, "tool_calls": [{"type": "function"}]}]},
         "messages[0].tool_calls[0].id"),
        ({"messages": [{**CALLING, "tool_calls": [{"id": "a"}]}]},
         "messages[0].tool_calls[0].function"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"verbosity": "low"}, "verbosity"),
        *[({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
          for name in ("messages", "tools", "add_generation_prompt", "documents", "eos_token",
                       "raise_exception", "namespace", "range", "not a name")],
    ],
)  # fmt: skip
def test_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generation(**fields)
    assert caught.value.param == param


NO_OBJECTS = (
    *('{"city": "Os', "{", "[1]", "7", "NaN", "null", '"text"', "text", "{'a': 1}", '{"a": NaN}'),
    *('{"a": "\n"}', '{"a": "\\ud800"}', '{"a": 1} {"b": 2}', "[" * 5000),
    '{"a": ' * 40 + "1" + "}" * 40,
)


@in_one_test("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    """A model may write such arguments; its conversation goes on, so that it can mend them."""
    call = {**CALL, "function": {"name": "clock", "arguments": arguments}}
    (_, calling) = messages_of(USER, {**CALLING, "tool_calls": [call]})
    (rendered,) = calling["tool_calls"]
    found = rendered["function"]["arguments"]
    assert (json.loads(found) if isinstance(found, str) else found) == {"invalid": arguments}


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ mood }}"
    "{% for message in messages %}{{ message.content }}{{ message.tool_calls }}{% endfor %}"
)


def test_large_body_has_the_prompt_and_the_options_of_a_small_one(
    model_files: ModelFiles,
) -> None:
    template = ChatTemplate(TEMPLATE, special_tokens=(), variables={})
    body = {
        "messages": [USER, CALLING, RESULT],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "include_reasoning": False,
        "chat_template_kwargs": {"mood": "glad"},
    }
    prepared = prepare_body(BodyJob("chat", msgspec.json.encode(body)), CHAT, model_files, template)
    short = to_generation_request(CHAT_FIELDS.decode(prepared.body), "tiny")
    (large,) = with_prompts([short], prepared.prompts)
    small = generation(**body)
    prompt: Any = small.prompt
    parts = template.render(prompt.messages, prompt.tools, variables=prompt.variables)
    assert isinstance(large.prompt, PackedPrompt)
    assert unpack_token_ids(large.prompt.tokens) == model_files.tokenizer.encode(parts)
    assert "glad" in "".join(parts) and '"clock"' in "".join(parts)
    assert large.prompt.num_calls == prompt.num_calls == 1
    assert (large.tools, large.reasoning) == (small.tools, small.reasoning)
