from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.text.stop_strings import StopAutomaton, StopStrings


class SearchedStrings:
    """The model: searches the whole text for every string, and compares every end of the text."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        start = self._find(text)
        if start is None:
            start = len(text) - self._num_held(text)
            self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.matched is not None else held

    def _find(self, text: str) -> int | None:
        best: tuple[int, int] | None = None  # (end, start): first to complete, then longest
        for each in self._strings:
            start = text.find(each)
            if start >= 0 and (best is None or (start + len(each), start) < best):
                best = (start + len(each), start)
                self.matched = each
        return None if best is None else best[1]

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        lengths = {
            length
            for each in self._strings
            for length in range(1, len(each))
            if text.endswith(each[:length])
        }
        return max(lengths, default=0)


def naive_cut(text: str, stops: list[str]) -> str:
    """Cuts at the match that completes first; if several complete together, at the longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


@given(
    parts=st.lists(st.text("ab\U0001f600", max_size=6), max_size=20),
    stops=st.lists(st.text("ab\U0001f600", min_size=1, max_size=9), max_size=6),
)
@example(parts=["abab", "a", "baa"], stops=["abababb", "baba", "ba" * 3])
@example(parts=["xab", "c"], stops=["abcd", "b", "abc"])
def test_every_call_returns_what_a_search_returns(parts: list[str], stops: list[str]) -> None:
    """For every split, and for a text that continues after `flush`."""
    strings, model = StopStrings(StopAutomaton(stops)), SearchedStrings(stops)
    for part in parts:
        assert strings.feed(part) == model.feed(part)
        assert strings.matched == model.matched
    assert strings.flush() == model.flush()
    assert strings.feed("ab") == model.feed("ab") and strings.flush() == model.flush()


@given(
    parts=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_equal_the_naive_model(parts: list[str], stops: list[str]) -> None:
    strings = StopStrings(StopAutomaton(stops))
    shown = ""
    for part in parts:
        shown += strings.feed(part)
        assert naive_cut("".join(parts), stops).startswith(shown)  # shows no part of a match
    shown += strings.flush()
    text = "".join(parts)
    assert shown == naive_cut(text, stops)
    assert (strings.matched is not None) == any(stop in text for stop in stops)


def test_partial_stop_string_is_buffered_until_decided() -> None:
    strings = StopStrings(StopAutomaton(["END"]))
    assert [strings.feed(part) for part in ("a E", "N", "x", "E", "ND", "more")] == [
        "a ",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert strings.matched == "END"
    assert strings.flush() == ""


class CountedAutomaton(StopAutomaton):
    num_transitions = 0

    def follow(self, state: int, character: str) -> int:
        self.num_transitions += 1
        return super().follow(state, character)


COSTLY = [f"{chr(ord('b') + i)} {'a' * 253}" for i in range(15)] + ["a" * 255 + "!"]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (COSTLY, "a" * 3_000),
        (COSTLY, ("a" * 252 + "b ") * 12),
        (["ab" * 127 + "!"], "ab" * 1_000 + "c" + "ab" * 300),
        (["aab" * 80 + "a" * 9, "ab" * 100], "aabaab" * 300 + "ab" * 98 + "c"),
    ],
)
def test_character_takes_at_most_two_transitions(stops: list[str], text: str) -> None:
    """On average over every start of the text, for text in which stop strings nearly complete."""
    automaton = CountedAutomaton(stops)
    strings, automaton.num_transitions = StopStrings(automaton), 0
    for num_read, character in enumerate(text, 1):
        strings.feed(character)
        assert automaton.num_transitions <= 2 * num_read
    assert strings.matched is None


@given(
    text=st.text("ab", max_size=200),
    stops=st.lists(st.text("ab", min_size=1, max_size=40), max_size=6),
)
def test_any_text_takes_at_most_two_transitions(text: str, stops: list[str]) -> None:
    automaton = CountedAutomaton(stops)
    automaton.num_transitions = 0
    automaton.run(0, text)
    assert automaton.num_transitions <= 2 * len(text)


def test_choices_of_a_request_share_the_automaton_and_no_text() -> None:
    automaton = StopAutomaton(["END"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert first.feed("E") == second.feed("EN") == ""
    assert first.feed("xEND") == "Ex" and second.feed("x") == "ENx"
    assert (first.matched, second.matched) == ("END", None)
