from __future__ import annotations

import json
import re

import pytest

from services.client.local_tools import TOOLS, find_tools
from shared.errors import ConfigError


def test_tools_are_found_by_name() -> None:
    assert [each.name for each in find_tools("dice, clock,dice")] == ["dice", "clock"]
    with pytest.raises(ConfigError, match="'weather' is not known: there are clock, dice"):
        find_tools("clock,weather")


def test_dice_roll_within_their_sides() -> None:
    rolled = TOOLS["dice"].result('{"sides": 3, "count": 50}').split()
    assert len(rolled) == 50 and set(rolled) <= {"1", "2", "3"}
    assert TOOLS["dice"].result("{}") in "123456"


def test_clock_shows_a_zone() -> None:
    assert re.fullmatch(r"\w+, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", TOOLS["clock"].result("{}"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dice", "{"),
        ("dice", "[]"),
        ("dice", json.dumps({"sides": 1})),
        ("dice", json.dumps({"sides": "6"})),
        ("dice", json.dumps({"faces": 6})),
        ("clock", json.dumps({"zone": "Atlantis"})),
        ("clock", json.dumps({"zone": "../etc"})),
        ("clock", json.dumps({"zone": 3})),
    ],
)
def test_wrong_arguments_give_an_error_as_result(name: str, arguments: str) -> None:
    assert TOOLS[name].result(arguments).startswith("error: ")
