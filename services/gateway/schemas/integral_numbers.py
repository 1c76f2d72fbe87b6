"""Writes numbers such as 8.0 and 1e3 as integers where a body's type demands one: JSON has one kind
of number, and JSON Schema calls 8.0 an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_INTEGER = 2**64 - 1  # larger numbers become this one, which fields without a bound accept
_MESSAGE = re.compile(
    r"Expected `(?:[^`]* \| )?int(?: \| [^`]*)?`, got `float` - at `\$(?P<path>[^`]*)`"
)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")

Step = re.Match[str]


def place_of_integer(message: str) -> list[Step]:
    """Returns the path in a body to the number that a ValidationError rejects because the field is
    an integer, or [] for any other error.
    """
    found = _MESSAGE.fullmatch(message)
    return [] if found is None else list(_STEP.finditer(found["path"]))


def write_integers(body: Any, place: Sequence[Step]) -> bool:
    """Writes the numbers at the path and beside it, in the same object or array, as integers.
    Returns False, with the body unchanged, if none of them at the path is integral.
    """
    *above, last = place
    holders = [body]
    for step in above:
        holders = [each for holder in holders for _, each in _children(holder, step)]
    if not any(_is_integral(each) for holder in holders for _, each in _children(holder, last)):
        return False
    for holder in holders:
        for key, value in list(_items(holder)):
            if _is_integral(value):
                holder[key] = min(int(value), MAX_INTEGER)
    return True


def _is_integral(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and value > -MAX_INTEGER


def _children(holder: Any, step: Step) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values that one step of a path selects; `[...]` selects all values of an
    object.
    """
    key = step["name"] if step["index"] is None else int(step["index"])
    return ((each, value) for each, value in _items(holder) if key in (None, each))


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return holder.items()
    return enumerate(holder) if isinstance(holder, list) else ()
