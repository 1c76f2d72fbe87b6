"""Tools that `hearth chat --tools` runs on this machine."""

from __future__ import annotations

import datetime
import random
import zoneinfo
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec

from shared.errors import ConfigError

MAX_SIDES = 1000


class LocalTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of this process. `run` takes the arguments by name; it may raise TypeError and
    ValueError, with a reason.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., str]

    @property
    def definition(self) -> dict[str, Any]:
        """The definition as the chat API accepts it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def result(self, arguments: str) -> str:
        """Returns the result of a call with arguments as JSON. An error is a result too: the model
        may correct it.
        """
        try:
            return self.run(**msgspec.json.decode(arguments, type=dict[str, Any]))
        except (TypeError, ValueError) as error:  # arguments that are not JSON are a ValueError
            return f"error: {error}"


def find_tools(names: str) -> tuple[LocalTool, ...]:
    """Returns tools by names with commas between them. Raises ConfigError for an unknown one."""
    listed = dict.fromkeys(each.strip() for each in names.split(","))
    unknown = [each for each in listed if each not in TOOLS]
    if unknown:
        raise ConfigError(f"--tools {unknown[0]!r} is not known: there are {_list(TOOLS)}")
    return tuple(TOOLS[each] for each in listed)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _clock(city: str) -> str:
    zone = _zones().get(_plain(city)) if isinstance(city, str) else None
    if zone is None:
        raise ValueError(f"no time zone is known for {city!r}")
    return datetime.datetime.now(zoneinfo.ZoneInfo(zone)).strftime("%H:%M")


@cache
def _zones() -> dict[str, str]:
    """Returns time zones by the city that they are named after: `oslo` -> `Europe/Oslo`."""
    names = sorted(zoneinfo.available_timezones(), key=len, reverse=True)
    return {_plain(name.rpartition("/")[2]): name for name in names if "/" in name}


def _plain(city: str) -> str:
    return city.strip().replace("_", " ").casefold()


def _dice(sides: int) -> str:
    if not isinstance(sides, int) or not 2 <= sides <= MAX_SIDES:
        raise ValueError(f"sides is {sides!r}, not a whole number from 2 to {MAX_SIDES}")
    return str(random.randint(1, sides))


def _parameters(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


# The demo model has learned tools of these names and parameters.
_CLOCK = LocalTool(
    name="clock",
    description="Returns the current local time of a city.",
    parameters=_parameters(city={"type": "string", "maxLength": 40}),
    run=_clock,
)
_DICE = LocalTool(
    name="dice",
    description="Roll a die with a number of sides.",
    parameters=_parameters(sides={"type": "integer", "minimum": 2, "maximum": MAX_SIDES}),
    run=_dice,
)
TOOLS = {each.name: each for each in (_CLOCK, _DICE)}
