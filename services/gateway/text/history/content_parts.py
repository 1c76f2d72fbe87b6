"""Converts contents to lists of parts, for templates that only loop over parts: of a text they
would render nothing, since Jinja loops over its characters, which have no type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]

_CALL = {"id": "call_0_00", "type": "function", "function": {"name": "f", "arguments": {}}}
_BEFORE: Mapping[str, Messages] = {
    "user": (),
    "system": (),
    "assistant": ({"role": "user", "content": "before"},),
    "tool": (
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    ),
}
_AFTER: Mapping[str, Messages] = {"system": ({"role": "user", "content": "after"},)}
_PROBE = "probed text"


def roles_with_parts(render: Render) -> frozenset[str]:
    """Returns the roles whose text the template writes only as a part. `render`: may raise anything
    for messages that the template rejects.
    """
    roles: frozenset[str] = frozenset()
    for role, before in _BEFORE.items():
        message = {"role": role, "content": _PROBE, "tool_call_id": _CALL["id"]}
        messages = [*before, message, *_AFTER.get(role, ())]
        if not _writes(render, with_parts(messages, roles)):
            found = roles | {role}
            if _writes(render, with_parts(messages, found)):
                roles = found
    return roles


def with_parts(messages: Messages, roles: frozenset[str]) -> Messages:
    if not roles:
        return messages
    return [_in_parts(each) if each["role"] in roles else each for each in messages]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    text = message["content"]
    if not isinstance(text, str):
        return message
    has_none = not text and bool(message.get("tool_calls"))
    return {**message, "content": [] if has_none else [{"type": "text", "text": text}]}


def _writes(render: Render, messages: Messages) -> bool:
    try:
        return _PROBE in render(messages)
    except Exception:  # the template may raise anything
        return False
