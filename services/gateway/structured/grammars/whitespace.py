"""Checks patterns of the whitespace between JSON tokens against JSON's whitespace."""

from __future__ import annotations

import re

from shared.errors import InvalidRequest

DEFAULT_PATTERN = r"[ \t\n\r]{0,4}"  # if unbounded, models write whitespace until max_tokens
MAX_PATTERN_CHARS = 256

_CHAR = r"(?:[ \t\n\r]|\\[tnrs]|\\x(?:20|09|0[aAdD]))"
_QUANTIFIER = r"(?:[*+?]|\{[0-9]{1,4}(?:,[0-9]{0,4})?\})"
_PATTERN = re.compile(rf"(?:{_CHAR}|\[{_CHAR}+\]|\((?:\?:)?|\)|\||{_QUANTIFIER})*")
_CLASS = re.compile(r"\[([^\]]*)\]")


def checked_whitespace(pattern: str, param: str) -> str:
    """Returns the pattern with `\\s` as JSON's four characters. Raises InvalidRequest for a pattern
    that may match other text, with which the output would not be JSON.
    """
    if len(pattern) > MAX_PATTERN_CHARS or _PATTERN.fullmatch(pattern) is None:
        raise InvalidRequest(
            f"{param}: only an expression of spaces, tabs and newlines is supported, such as "
            r"[ \n]{0,8}",
            param=param,
        )
    in_class = _CLASS.sub(lambda found: found[0].replace(r"\s", r" \t\n\r"), pattern)
    return in_class.replace(r"\s", r"[ \t\n\r]")
