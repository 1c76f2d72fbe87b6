"""OpenAI's SDK: calls of tools by choice, whole and streamed, and a conversation that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.support.account import AGENT_MODEL, Account

MESSAGES = [{"role": "user", "content": "What time is it in Berlin?"}]
ANSWER = "The tool has answered."


class Clock(BaseModel):
    """The time in a zone."""

    zone: str
    hour: int


class Dice(BaseModel):
    sides: int


TOOLS = [openai.pydantic_function_tool(each) for each in (Clock, Dice)]
NAMED = {"type": "function", "function": {"name": "Dice"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "Clock"}}],
    },
}


@pytest.fixture
def client(account: Account) -> Iterator[openai.OpenAI]:
    address = {"base_url": f"{account.url}/v1", "api_key": account.token}
    with openai.OpenAI(**address, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", {"Clock", "Dice"}),
        ("required", {"Clock", "Dice"}),
        (NAMED, {"Dice"}),
        (ALLOWED, {"Clock"}),
    ],
)
def test_calls_by_choice(client: openai.OpenAI, choice, names, is_parallel) -> None:
    request = {
        "model": AGENT_MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "temperature": 0,
    }
    [whole] = client.chat.completions.parse(**request).choices
    with client.chat.completions.stream(**request) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    for each in (whole, streamed):
        assert each.finish_reason == "tool_calls" and not each.message.content
        [call] = each.message.tool_calls
        assert call.function.name in names
        assert isinstance(call.function.parsed_arguments, Clock | Dice)
    first, second = (each.message.tool_calls[0].function for each in (whole, streamed))
    assert (first.name, first.arguments) == (second.name, second.arguments)


def test_choice_none_never_calls(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=AGENT_MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none"
    )
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].message.content == ANSWER and not done.choices[0].message.tool_calls


def test_conversation_goes_on_with_the_sdks_own_message(client: openai.OpenAI) -> None:
    messages: list = [*MESSAGES]
    for _ in range(3):
        done = client.chat.completions.create(model=AGENT_MODEL, messages=messages, tools=TOOLS)
        message = done.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12:34"})
        done = client.chat.completions.create(model=AGENT_MODEL, messages=messages, tools=TOOLS)
        assert done.choices[0].message.content == ANSWER
        messages += [done.choices[0].message, {"role": "user", "content": "And now?"}]


def test_bad_tools_are_refused_by_field(client: openai.OpenAI) -> None:
    cases = [
        ("tools[1].function.name", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tool_choice", {"tool_choice": "required"}),
        (
            "tool_choice.function.name",
            {"tools": [TOOLS[0]], "tool_choice": NAMED},
        ),
    ]
    for param, fields in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=AGENT_MODEL, messages=MESSAGES, **fields)
        assert refused.value.param == param
