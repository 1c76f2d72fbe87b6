"""Writes numbers such as 8.0 and 1e3 as integers where a body's type demands one: JSON has one kind
of number, and JSON Schema calls 8.0 an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_NUMBERS = 16  # of one body: each takes another pass
_MESSAGE = re.compile(
    r"Expected `(?:[^`]* \| )?int(?: \| [^`]*)?`, got `float` - at `\$(?P<path>[^`]*)`"
)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def with_integer(data: bytes, message: str) -> bytes | None:
    """The body with an integer at the place that a ValidationError names. None if another error is
    named, or a number with a fraction is there.
    """
    found = _MESSAGE.fullmatch(message)
    steps = [] if found is None else list(_STEP.finditer(found["path"]))
    if not steps:
        return None
    *above, last = steps
    body = msgspec.json.decode(data)
    holders = [body]
    for step in above:
        holders = [each for holder in holders for _, each in _children(holder, step)]
    changed = False
    for holder in holders:
        for key, value in list(_children(holder, last)):
            if isinstance(value, float) and value.is_integer():
                holder[key] = int(value)
                changed = True
    return msgspec.json.encode(body) if changed else None


def _children(holder: Any, step: re.Match[str]) -> Iterator[tuple[Any, Any]]:
    """The keys and values that a step of a path leads to; `[...]`: all values of an object."""
    if step["name"] is not None:
        if isinstance(holder, dict) and step["name"] in holder:
            yield step["name"], holder[step["name"]]
    elif isinstance(holder, list):
        index = None if step["index"] is None else int(step["index"])
        if index is None:
            yield from enumerate(holder)
        elif index < len(holder):
            yield index, holder[index]
    elif isinstance(holder, dict):
        yield from holder.items()
