"""Two turns in the shape of Claude Code: a call, its result, and the cache in between."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic.types import Message

from tests.clients.account import AGENT_MODEL
from tests.clients.messages.claude_code import HEADERS, body_of, first_messages, next_messages


def send(client: anthropic.Anthropic, body: dict[str, Any]) -> Message:
    """Claude Code's own client sends the body to the path of the beta."""
    stream = client.post(
        "/v1/messages?beta=true",
        body=body,
        cast_to=Message,
        stream=True,
        stream_cls=anthropic.Stream[anthropic.types.RawMessageStreamEvent],
        options={"headers": HEADERS},
    )
    message: Message | None = None
    from anthropic.lib.streaming._messages import accumulate_event

    for event in stream:
        if event.type != "ping":
            message = accumulate_event(
                event=event, current_snapshot=message, request_headers=anthropic.NOT_GIVEN
            )
    assert message is not None
    return message


def test_second_turn_is_cached(agent_client: anthropic.Anthropic) -> None:
    messages = first_messages("List the files.")
    first = send(agent_client, body_of(messages, AGENT_MODEL, 1))
    assert first.stop_reason == "tool_use"
    answer = [each.to_dict() for each in first.content]
    messages = next_messages(messages, answer, "README.md")
    body = body_of(messages, AGENT_MODEL, 2)
    second = send(agent_client, body)
    assert second.stop_reason == "end_turn"
    usage = second.usage
    cached = usage.cache_read_input_tokens or 0
    assert cached >= 0.95 * (usage.input_tokens + cached), usage
    fields = ("model", "messages", "system", "tools", "thinking")
    count = agent_client.messages.count_tokens(**{name: body[name] for name in fields})
    assert count.input_tokens == usage.input_tokens + cached
