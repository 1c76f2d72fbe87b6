"""Searches of a response template's patterns."""

from __future__ import annotations

import copy
import sys
import time

import pytest
import regex

from services.gateway.structured.tools.families import FAMILIES
from services.gateway.structured.tools.parsing.delimiter import (
    _SPACES,
    MAX_TIMEOUTS,
    REGAIN_S,
    Delimiter,
    Patience,
    delimiter,
)
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.structured.tools.parsing.response_template import compiled_template
from shared.errors import ConfigError


def test_pattern_that_was_too_slow_is_tried_again_later() -> None:
    time_s = 0.0
    slow, found = "a" * 40, "aab"
    pattern = regex.compile("(a|aa)+b")
    tried = Delimiter(pattern, can_grow=False, patience=Patience(lambda: time_s))

    def matches() -> bool:
        return tried.search(found, is_ended=True)[0] is not None

    def lose(times: int) -> None:
        for _ in range(times):
            assert tried.search(slow, is_ended=True) == (None, False)

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


@pytest.mark.parametrize("key", ["open", "close"])
def test_slow_patterns_of_a_template_share_their_patience(key: str) -> None:
    """Each would search for minutes."""
    source = copy.deepcopy(FAMILIES["hermes"].response_template)
    calls = source["fields"]["tool_calls"]
    text = calls["open"] + '{"name":"a","arguments":{}}' + "x" * 40 + "!"
    del calls[key]
    calls[f"{key}_pattern"] = "(x|xx)+y"
    other = calls if key == "open" else {**calls, "open": "<a>"}
    source["fields"] |= {f"field_{number}": other for number in range(20)}
    markers = MarkerTokens()
    parser = ResponseParser(
        compiled_template(source, markers),
        markers,
        0,
        schemas={"a": {}},
        call_id_of=lambda _, name: name,
    )
    began_s = time.process_time()
    for _ in range(2 * MAX_TIMEOUTS):
        parser.feed(text)
    parser.finish()
    assert time.process_time() - began_s < 0.5


def test_long_pattern_is_refused() -> None:
    pattern = f"(?<={'a|' * 10_000}b)"
    with pytest.raises(ConfigError, match="x_pattern: has 20006 characters, the limit is 1024"):
        delimiter("x", None, pattern, MarkerTokens(), Patience())


def test_leads_are_sought_among_all_spaces() -> None:
    spaces = {each for each in map(chr, range(sys.maxunicode + 1)) if each.isspace()}
    assert set(_SPACES) == spaces
