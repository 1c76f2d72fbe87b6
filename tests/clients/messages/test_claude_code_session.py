"""Two turns in the shape of Claude Code: a call, its result, and the cache in between."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic.types import Message

from tests.clients.messages.claude_code import HEADERS, body_of, first_messages, next_messages
from tests.support.account import AGENT_MODEL


def send(client: anthropic.Anthropic, body: dict[str, Any]) -> Message:
    """Some fields are of the beta, to whose path Claude Code sends."""
    own = ("context_management", "output_config")
    fields = {name: each for name, each in body.items() if name not in (*own, "stream")}
    with client.messages.stream(
        **fields,
        extra_headers=HEADERS,
        extra_query={"beta": "true"},
        extra_body={name: body[name] for name in own},
    ) as stream:
        return stream.get_final_message()


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
