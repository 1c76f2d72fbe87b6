"""Renders an event of a log as text for humans.

2026-11-27 16:28:03.123Z warning gateway-1 peer_lost peer=decode-2 loss=silent
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

FIRST_KEYS = ("timestamp", "level", "event")  # of a JSON line; then come "process" and the others
_LEVEL_WIDTH = len("warning")
_DIM, _BOLD, _CYAN, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[36m", "\x1b[0m"
_LEVEL_STYLES = {
    "debug": "\x1b[2m",
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "critical": "\x1b[1;31m",
}


def text_of(event: Mapping[str, Any], *, has_colors: bool) -> str:
    """Returns one line, and below it the traceback of an event with an exception, indented.

    Control characters are escaped, so that no logged text can command the terminal.
    """
    line = " ".join(filter(None, _parts(event, has_colors=has_colors)))
    trace = event.get("exception")
    if not trace:
        return line
    return "\n".join([line, *(f"    {printable(each)}" for each in str(trace).splitlines())])


def _parts(event: Mapping[str, Any], *, has_colors: bool) -> Iterator[str]:
    def styled(text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if has_colors and text and style else text

    level = str(event.get("level", ""))
    yield styled(short_time(str(event.get("timestamp", ""))), _DIM)
    yield styled(level.ljust(_LEVEL_WIDTH), _LEVEL_STYLES.get(level, ""))
    yield styled(printable(str(event.get("process", ""))), _CYAN)
    yield styled(printable(str(event.get("event", ""))), _BOLD)
    for key, value in event.items():
        if key not in (*FIRST_KEYS, "process", "exception"):
            yield f"{styled(printable(key), _DIM)}={_value(value)}"


def short_time(timestamp: str) -> str:
    """Returns the time of an ISO timestamp in UTC, with milliseconds."""
    date, _, rest = timestamp.partition("T")
    if not rest.endswith("Z"):
        return printable(timestamp)
    clock, _, fraction = rest.removesuffix("Z").partition(".")
    return printable(f"{date} {clock}.{fraction.ljust(3, '0')[:3]}Z")


def printable(text: str) -> str:
    """Escapes control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _value(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(" =\"'"):
        return value
    if isinstance(value, dict) and value:
        inner = (f"{printable(str(key))}={_value(each)}" for key, each in value.items())
        return f"{{{' '.join(inner)}}}"
    try:
        return printable(json.dumps(value, ensure_ascii=False, default=repr))
    except (TypeError, ValueError):  # keys of another type, a circle
        return printable(repr(value))
