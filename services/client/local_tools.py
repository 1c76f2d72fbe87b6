"""Tools that `hearth chat --tools` runs on this machine."""

from __future__ import annotations

import datetime
import random
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from shared.errors import ConfigError

MAX_DICE = 100


class LocalTool(msgspec.Struct, frozen=True, kw_only=True):
    """`run` takes the arguments by name; it may raise TypeError and ValueError, with a reason."""

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., str]

    @property
    def definition(self) -> dict[str, Any]:
        """As the chat API takes it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def result(self, arguments: str) -> str:
        """Of a call with arguments as JSON. An error is a result too: the model may correct it."""
        try:
            return self.run(**msgspec.json.decode(arguments, type=dict[str, Any]))
        except (TypeError, ValueError) as error:  # arguments that are not JSON are a ValueError
            return f"error: {error}"


def find_tools(names: str) -> tuple[LocalTool, ...]:
    """Of names with commas between them. Raises ConfigError for an unknown one."""
    listed = dict.fromkeys(each.strip() for each in names.split(","))
    unknown = [each for each in listed if each not in TOOLS]
    if unknown:
        raise ConfigError(f"--tools {unknown[0]!r} is not known: there are {_list(TOOLS)}")
    return tuple(TOOLS[each] for each in listed)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _clock(zone: str = "UTC") -> str:
    try:
        here = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"zone {zone!r} is not known; one is Europe/Berlin") from None
    return datetime.datetime.now(here).strftime("%A, %Y-%m-%d %H:%M:%S %Z")


def _dice(sides: int = 6, count: int = 1) -> str:
    for name, value, least, most in (("sides", sides, 2, 1000), ("count", count, 1, MAX_DICE)):
        if not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}, not a whole number from {least} to {most}")
    return " ".join(str(random.randint(1, sides)) for _ in range(count))


def _whole_number(description: str, least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most, "description": description}


_CLOCK = LocalTool(
    name="clock",
    description="The current time and date in a time zone.",
    parameters={
        "type": "object",
        "properties": {
            "zone": {"type": "string", "description": "IANA name, such as Europe/Berlin"}
        },
        "additionalProperties": False,
    },
    run=_clock,
)
_DICE = LocalTool(
    name="dice",
    description="Rolls dice.",
    parameters={
        "type": "object",
        "properties": {
            "sides": _whole_number("of each die (default: 6)", 2, 1000),
            "count": _whole_number("number of dice (default: 1)", 1, MAX_DICE),
        },
        "additionalProperties": False,
    },
    run=_dice,
)
TOOLS = {each.name: each for each in (_CLOCK, _DICE)}
