"""Histories with several calls, or a text beside reasoning, with templates that take less. The
template is like gpt-oss's: it writes one call a message, and reasoning or a text in one channel.
"""

from __future__ import annotations

from typing import Any

from services.gateway.text.chat_template import ChatTemplate

LIKE_GPT_OSS = (
    "{% if tools %}{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' and 'tool_calls' in message %}"
    "{% if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "[analysis {{ message.content or message.thinking }}]"
    "{% set c = message.tool_calls[0].function %}[{{ c.name }} {{ c.arguments | tojson }}]"
    "{% else %}[{{ message.role }} {{ message.content }}]{% endif %}{% endfor %}"
)
OTHER = (
    "{% if tools %}{% endif %}{% for message in messages %}"
    "[{{ message.role }} {{ message.content }} {{ message.thinking }}"
    "{% for c in message.tool_calls or [] %} {{ c.function.name }}{% endfor %}]{% endfor %}"
)
USER = {"role": "user", "content": "q"}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": name, "name": name}


def calling(*names: str, **texts: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(n) for n in names], **texts}


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return "".join(ChatTemplate(source, special_tokens=(), variables={}).render([USER, *messages]))


def test_each_call_has_its_message_and_its_result() -> None:
    history = (
        calling("a", "b", content="t"),
        result("b", "of b"),
        result("a", "of a"),
        calling("c"),
        result("c", "of c"),
    )
    expected = (
        "[user q][analysis t][a {}][tool of a][analysis ][b {}][tool of b][analysis ][c {}]"
        "[tool of c]"
    )
    assert rendered(LIKE_GPT_OSS, *history) == expected
    assert rendered(OTHER, *history[:3]) == "[user q ][assistant t  a b][tool of b ][tool of a ]"


def test_missing_results_leave_all_calls() -> None:
    history = (calling("a", "b"), result("b", "of b"), USER)
    expected = "[user q][analysis ][a {}][analysis ][b {}][tool of b][user q]"
    assert rendered(LIKE_GPT_OSS, *history) == expected


def test_text_beside_reasoning_joins_it() -> None:
    both = calling("a", content="text", reasoning_content="thought")
    assert rendered(LIKE_GPT_OSS, both) == "[user q][analysis thought\ntext][a {}]"
    alone = calling("a", reasoning_content="thought")
    assert rendered(LIKE_GPT_OSS, alone) == "[user q][analysis thought][a {}]"
    assert rendered(OTHER, both) == "[user q ][assistant text thought a]"
