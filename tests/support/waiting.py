"""Waits of tests. Each polls a condition and, when its time is over, says which and what it saw.

A limit is for a machine where a core is shared by many: what takes milliseconds here may take
seconds there, and a limit that is reached only by a failure costs nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import textwrap
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0
POLL_S = 0.01
MAX_SEEN = 4000  # characters

Seen = Callable[[], object]


class NotReached(AssertionError):
    """A condition was not true in time."""


async def until(
    condition: Callable[[], Any],
    *,
    timeout_s: float = LIMIT_S,
    poll_s: float = POLL_S,
    seen: Seen = lambda: "",
) -> Any:
    """Polls until the condition is true, and returns its value.

    `condition` is a function or a coroutine function. Raises NotReached with the condition's
    source, its last value and what `seen` returns.
    """
    value: Any = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(poll_s)
    except TimeoutError:
        raise NotReached(_not_reached(condition, timeout_s, value, seen)) from None


async def until_changed(
    condition: Callable[[], Any],
    changed: asyncio.Event,
    *,
    timeout_s: float = LIMIT_S,
    seen: Seen = lambda: "",
) -> Any:
    """Waits like `until`, for a condition that may become true each time `changed` is
    set; clears that.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (value := condition()):
                changed.clear()
                await changed.wait()
            return value
    except TimeoutError:
        raise NotReached(_not_reached(condition, timeout_s, value, seen)) from None


def wait_until(
    condition: Callable[[], Any],
    *,
    timeout_s: float = LIMIT_S,
    poll_s: float = POLL_S,
    seen: Seen = lambda: "",
) -> Any:
    """Waits like `until`, without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotReached(_not_reached(condition, timeout_s, value, seen))
        time.sleep(poll_s)
    return value


def _not_reached(
    condition: Callable[[], object], timeout_s: float, value: object, seen: Seen
) -> str:
    lines = [f"not within {timeout_s:g} s: {_source(condition)}", f"last value: {value!r}"]
    if found := str(seen())[-MAX_SEEN:]:
        lines.append(f"seen: {found}")
    return "\n".join(each[:MAX_SEEN] for each in lines)


def _source(condition: Callable[[], object]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(condition)).strip()
    except (OSError, TypeError):
        return repr(condition)
