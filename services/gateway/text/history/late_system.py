"""Moves system messages after the first, for templates that do not write them in their place.

Such a text becomes part of the user's message before it, else of the one after it. It stays where
it is: at the start of the prompt it would change every block of the cache after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.gateway.text.history.contents import joined

Messages = Sequence[Mapping[str, Any]]

_PROBE = tuple(
    {"role": role, "content": f"\n{role} {index}\n"}
    for index, role in enumerate(("system", "user", "system", "assistant", "user"))
)


def has_late_system(messages: Messages) -> bool:
    return any(each["role"] == "system" for each in messages[1:])


def writes_in_place(render: Callable[[Messages], str]) -> bool:
    """Returns whether the template writes a system message after a user's where it stands.
    `render`: raises ValueError for messages that the template rejects.
    """
    try:
        text = render(_PROBE)
    except ValueError:
        return False
    places = [text.find(each["content"].strip()) for each in _PROBE[1:]]
    return -1 not in places and places == sorted(places)


def with_late_system_as_user(messages: Messages) -> list[Mapping[str, Any]]:
    converted: list[Mapping[str, Any]] = []
    is_open = False  # a system text ends the user's message: the next one of the user joins it
    for index, message in enumerate(messages):
        role, is_late = message["role"], index > 0 and message["role"] == "system"
        last = converted[-1] if converted else None
        if (
            last is not None
            and last["role"] == "user"
            and (is_late or (is_open and role == "user"))
        ):
            content = joined(last["content"], message["content"])
            converted[-1] = {**last, "content": content}
        elif is_late:
            converted.append({"role": "user", "content": message["content"]})
        else:
            converted.append(message)
        is_open = is_late
    return converted
