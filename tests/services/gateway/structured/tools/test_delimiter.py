"""Searches of a response template's patterns."""

from __future__ import annotations

import sys

import regex

from services.gateway.structured.tools.parsing.delimiter import (
    _SPACES,
    MAX_TIMEOUTS,
    REGAIN_S,
    Delimiter,
    Patience,
)


def test_pattern_that_was_too_slow_is_tried_again_later() -> None:
    time_s = 0.0
    slow, found = "a" * 40, "aab"
    pattern = regex.compile("(a|aa)+b")
    delimiter = Delimiter(pattern, can_grow=False, patience=Patience(lambda: time_s))

    def matches() -> bool:
        return delimiter.search(found, is_ended=True)[0] is not None

    def lose(times: int) -> None:
        for _ in range(times):
            assert delimiter.search(slow, is_ended=True) == (None, False)

    lose(MAX_TIMEOUTS - 1)
    assert matches()
    lose(1)
    assert not matches()
    time_s = REGAIN_S
    assert matches()
    lose(1)
    assert not matches()
    time_s = (MAX_TIMEOUTS + 1) * REGAIN_S
    lose(MAX_TIMEOUTS - 1)
    assert matches()


def test_leads_are_sought_among_all_spaces() -> None:
    spaces = {each for each in map(chr, range(sys.maxunicode + 1)) if each.isspace()}
    assert set(_SPACES) == spaces
