"""LiteLLM with OpenAI's format: objects of a class, and calls of tools, whole and streamed."""

from __future__ import annotations

import json

import litellm
import pytest
from pydantic import BaseModel

from tests.support.account import AGENT_MODEL, AGENTS, Account

MESSAGES = [{"role": "user", "content": "What time is it in Berlin?"}]


class Hour(BaseModel):
    zone: str
    hour: int


TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": Hour.model_json_schema()},
}


@pytest.fixture
def route(accounts: dict[str, Account]) -> dict[str, object]:
    account = accounts[AGENTS]
    return {
        "model": f"openai/{AGENT_MODEL}",
        "api_base": f"{account.url}/v1",
        "api_key": account.token,
        "messages": MESSAGES,
        "num_retries": 0,
    }


def test_objects(route: dict[str, object]) -> None:
    whole = litellm.completion(**route, response_format=Hour)
    assert Hour.model_validate_json(whole.choices[0].message.content)
    chunks = litellm.completion(**route, response_format=Hour, stream=True)
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    assert Hour.model_validate_json(text)


def test_calls(route: dict[str, object]) -> None:
    whole = litellm.completion(**route, tools=[TOOL], temperature=0)
    chunks = list(litellm.completion(**route, tools=[TOOL], temperature=0, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    for answer in (whole, built):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.function.name == "clock"
        assert Hour.model_validate(json.loads(call.function.arguments))
