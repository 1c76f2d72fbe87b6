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
    assert {TOOLS["dice"].result('{"sides": 3}') for _ in range(50)} <= {"1", "2", "3"}


@pytest.mark.parametrize("city", ["Oslo", "new york", " Sao_Paulo "])
def test_clock_shows_the_time_of_a_city(city: str) -> None:
    assert re.fullmatch(r"\d\d:\d\d", TOOLS["clock"].result(json.dumps({"city": city})))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dice", "{"),
        ("dice", "[]"),
        ("dice", json.dumps({"sides": 1})),
        ("dice", json.dumps({"sides": "6"})),
        ("dice", json.dumps({"faces": 6})),
        ("clock", json.dumps({"city": "Atlantis"})),
        ("clock", json.dumps({"city": "../etc"})),
        ("clock", json.dumps({"city": 3})),
    ],
)
def test_wrong_arguments_give_an_error_as_result(name: str, arguments: str) -> None:
    assert TOOLS[name].result(arguments).startswith("error: ")
