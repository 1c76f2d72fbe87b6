"""One call a message, after one text, for templates that write no more, such as gpt-oss's.

Of several calls of a message such a template writes the first alone; a text beside reasoning it
rejects. Each call gets a message of its own, its results after it, and a text joins the reasoning:
alone, the template shows it in the same channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.gateway.text.history.contents import texts_of

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]  # raises ValueError for messages that the template rejects

_NAMES = ("first_probe", "second_probe")


def writes_one_call(render: Render) -> bool:
    """Returns whether the template leaves out the second call of a message."""
    try:
        text = render(_probe(*_NAMES))
    except ValueError:
        return False
    return _NAMES[0] in text and _NAMES[1] not in text


def rejects_text_beside_reasoning(render: Render) -> bool:
    """Returns whether the template takes either before a call, but not both."""
    try:
        render(_probe(_NAMES[0], thinking="thought"))
    except ValueError:
        return False
    try:
        render(_probe(_NAMES[0], thinking="thought", content="text"))
    except ValueError:
        return True
    return False


def has_several_calls(messages: Messages) -> bool:
    return any(len(each.get("tool_calls") or ()) > 1 for each in messages)


def has_text_beside_reasoning(messages: Messages) -> bool:
    return any(map(_has_both, messages))


def with_single_calls(messages: Messages) -> list[Mapping[str, Any]]:
    converted: list[Mapping[str, Any]] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            converted.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        converted += _one_by_one(message, calls, results)
    return converted


def with_text_in_reasoning(messages: Messages) -> list[Mapping[str, Any]]:
    return [_with_joined(each) if _has_both(each) else each for each in messages]


def _one_by_one(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], results: Messages
) -> list[Mapping[str, Any]]:
    """Returns messages of one call each, the texts before the first, and results after theirs."""
    found: list[Mapping[str, Any]] = []
    others = {"role": message["role"], "content": ""}
    for number, call in enumerate(calls):
        found.append({**(others if number else message), "tool_calls": [call]})
        is_last = number == len(calls) - 1
        own = [each for each in results if each.get("tool_call_id") == call["id"]]
        found += [each for each in results if each not in found] if is_last else own
    return found


def _has_both(message: Mapping[str, Any]) -> bool:
    has_calls = bool(message.get("tool_calls"))
    return has_calls and bool(message.get("content")) and bool(message.get("reasoning_content"))


def _with_joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    texts = message["reasoning_content"], *texts_of(message["content"])
    return {**message, "reasoning_content": "\n".join(texts), "content": ""}


def _probe(*names: str, thinking: str = "", content: str = "") -> Messages:
    calls = [
        {"id": f"call{name}", "type": "function", "function": {"name": name, "arguments": {}}}
        for name in names
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if thinking:
        answer |= {"thinking": thinking, "reasoning_content": thinking}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "done"} for each in calls]
    return [{"role": "user", "content": "question"}, answer, *results]
