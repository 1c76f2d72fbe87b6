"""Anthropic's SDK against /v1/messages. Pydantic checks every event of a stream strictly."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.clients.conftest import Reference
from tests.support.account import AGENT_MODEL, MODEL, Account

EVENT = TypeAdapter(RawMessageStreamEvent)
MESSAGES = [{"role": "user", "content": "Where does the phrase Hello, World come from?"}]
SYSTEM = "You answer briefly."
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32,
    "system": SYSTEM,
    "messages": MESSAGES,
    "extra_body": {"seed": 7, "temperature": 0.8},  # the SDK has no argument for them
}
CLOCK = {
    "name": "clock",
    "description": "tells the time",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"type": "string", "maxLength": 9}, "hour": {"type": "integer"}},
        "required": ["zone", "hour"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "What time is it in Oslo?"}]


def expected_text(reference: Reference) -> str:
    messages = [{"role": "system", "content": SYSTEM}, *MESSAGES]
    return reference.chat_text(messages, temperature=0.8, seed=7, max_tokens=32)


def strict_events(account: Account, body: dict[str, Any]) -> list[Any]:
    """Every event of a stream, but for pings, which the types do not have."""
    headers = {"x-api-key": account.token}
    with httpx.stream(
        "POST", f"{account.url}/v1/messages", json=body, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        lines = [each.removeprefix("data: ") for each in response.iter_lines() if each[:1] == "d"]
    return [EVENT.validate_json(each) for each in lines if '"type":"ping"' not in each]


def test_message(client: anthropic.Anthropic, reference: Reference) -> None:
    raw = client.messages.with_raw_response.create(**REQUEST)
    message = Message.model_validate_json(raw.read())
    [block] = message.content
    assert block.type == "text" and block.text == expected_text(reference)
    assert raw.headers["request-id"] in message.id


def test_stream(client: anthropic.Anthropic, account: Account, reference: Reference) -> None:
    with client.messages.stream(**REQUEST) as stream:
        assert "".join(stream.text_stream) == expected_text(reference)
        message = stream.get_final_message()
    whole = client.messages.create(**REQUEST)
    assert [each.to_dict() for each in message.content] == [
        each.to_dict() for each in whole.content
    ]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    extra = REQUEST["extra_body"]
    body = {key: value for key, value in REQUEST.items() if key != "extra_body"}
    events = strict_events(account, {**body, **extra, "stream": True})
    assert events[-1].type == "message_stop"


async def test_async_stream(account: Account, reference: Reference) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=account.url, api_key=account.token) as client,
        client.messages.stream(**REQUEST) as stream,
    ):
        text = "".join([each async for each in stream.text_stream])
    assert text == expected_text(reference)


def test_count_tokens_is_usage(client: anthropic.Anthropic) -> None:
    counted = client.messages.with_raw_response.count_tokens(
        model=MODEL, system=SYSTEM, messages=MESSAGES
    )
    count = MessageTokensCount.model_validate_json(counted.read())
    usage = client.messages.create(**REQUEST).usage
    assert usage.cache_read_input_tokens is not None
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequence(client: anthropic.Anthropic, reference: Reference) -> None:
    text = expected_text(reference)
    stop = text[len(text) // 2 :][:3]
    message = client.messages.create(**REQUEST, stop_sequences=["never", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(each.text for each in message.content) == text.partition(stop)[0]


def test_tools(agent_client: anthropic.Anthropic, agents: Account) -> None:
    """A call and its result, streamed and whole."""
    request: dict[str, Any] = {"model": AGENT_MODEL, "max_tokens": 200, "tools": [CLOCK]}
    with agent_client.messages.stream(**request, messages=QUESTION, extra_body=GREEDY) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    [call] = [each for each in message.content if each.type == "tool_use"]
    assert (call.name, call.input.keys()) == ("clock", {"zone", "hour"})
    whole = agent_client.messages.create(**request, messages=QUESTION, extra_body=GREEDY)
    assert [each.input for each in whole.content if each.type == "tool_use"] == [call.input]
    body = {**request, "messages": QUESTION, "temperature": 0, "stream": True}
    kinds = [each.type for each in strict_events(agents, body)]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is 9."}
    answered = agent_client.messages.create(
        **request,
        messages=[
            *QUESTION,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert answered.stop_reason == "end_turn"


class Hour(BaseModel):
    zone: str
    hour: int


def test_parse(agent_client: anthropic.Anthropic) -> None:
    parsed = agent_client.messages.parse(
        model=AGENT_MODEL, max_tokens=200, messages=QUESTION, output_format=Hour
    )
    assert isinstance(parsed.parsed_output, Hour)


def test_models(client: anthropic.Anthropic) -> None:
    listed = {each.id: each for each in client.models.list()}
    assert listed[MODEL].type == "model"
    assert listed[MODEL].created_at.year >= 2025
    assert client.models.retrieve(MODEL).display_name == MODEL


def test_errors_are_exceptions_by_status(
    client: anthropic.Anthropic, limited_account: Account, restricted_account: Account
) -> None:
    def raised(kind: type[anthropic.APIStatusError], **changes: Any) -> dict[str, Any]:
        with pytest.raises(kind) as error:
            client.messages.create(**{**REQUEST, **changes})
        body = error.value.body
        assert isinstance(body, dict) and error.value.request_id == body["request_id"]
        return body["error"]

    assert raised(anthropic.NotFoundError, model="no/such")["type"] == "not_found_error"
    invalid = raised(anthropic.BadRequestError, extra_body={"temperature": -1})
    assert "temperature" in invalid["message"]
    long = [{"role": "user", "content": "word " * 8_000}]
    assert "prompt is too long" in raised(anthropic.BadRequestError, messages=long)["message"]
    for account, kind in (
        (limited_account, anthropic.RateLimitError),
        (restricted_account, anthropic.PermissionDeniedError),
    ):
        other = client.with_options(api_key=account.token)
        with pytest.raises(kind):
            for _ in range(3):
                other.messages.create(**REQUEST)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**REQUEST)
