"""Limits of clients' JSON values, checked before other code traverses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shared.errors import PayloadTooLarge

MAX_DEPTH = 32
MAX_VALUES = 16_384  # values of one field together


def check_values(values: Sequence[Any], param: str) -> None:
    """Raises PayloadTooLarge for values that are nested deeper than MAX_DEPTH or more than
    MAX_VALUES.
    """
    level: list[Any] = list(values)
    num_values, depth = 0, 0
    while level:
        num_values, depth = num_values + len(level), depth + 1
        if num_values > MAX_VALUES:
            raise PayloadTooLarge(f"{param}: more than {MAX_VALUES} values", param=param)
        if depth > MAX_DEPTH:
            raise PayloadTooLarge(f"{param}: nested deeper than {MAX_DEPTH}", param=param)
        level = [value for each in level for value in _children(each)]


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
