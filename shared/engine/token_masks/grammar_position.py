"""Tracks the position of a choice's output in its grammar. No I/O, no threads.

FREE ──a start in the output──▶ CONSTRAINED ──the grammar's end, if it repeats──▶ FREE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.grammar.matcher import Matcher
from shared.grammar.spec import GrammarSpec


class GrammarPosition:
    """The position of an output in its grammar. Not for two threads at the same time."""

    def __init__(self, spec: GrammarSpec, new_matcher: Callable[[], Matcher]) -> None:
        """Starts at the first token. `new_matcher` returns a matcher before its first token; it is
        called with the first mask, or the first token under the grammar.
        """
        self.is_free = bool(spec.starts_after)
        self.bans_stop = self.is_free and spec.is_required
        self._starts = spec.starts_after
        self._marks = spec.reasoning
        self._is_reasoning = self._marks is not None and self._marks.is_open
        marks = () if self._marks is None else (self._marks.opens, self._marks.closes)
        self._longest_start = max(map(len, (*self._starts, *marks)), default=0)
        self._recent: list[int] = []  # free tokens: as many as a start or a mark has
        self._repeats = spec.repeats and bool(spec.starts_after)
        self._new_matcher = new_matcher
        self._matcher: Matcher | None = None

    def advance(self, token_ids: Sequence[int]) -> int:
        """The output continues. Returns how many of the tokens are allowed, one after the other.
        Raises GrammarTooComplex for a limit of the grammar.
        """
        begin = 0
        while begin < len(token_ids):
            if self.is_free:
                begin = self._advance_freely(token_ids, begin)
                continue
            begin += self._constraining().accept(token_ids[begin:])
            self._free_at_end()
            if not self.is_free:
                break
        return begin

    def fill(self) -> bytes | None:
        """Returns the words of the next token's mask, as of `Matcher.fill`; None: all are allowed.

        Raises GrammarTooComplex for a limit, or if no output can be completed from here.
        """
        if self.is_free:
            return None
        words = self._constraining().fill()
        self._free_at_end()
        return None if self.is_free else words

    def _advance_freely(self, token_ids: Sequence[int], begin: int) -> int:
        """Returns the index after the first start; the number of tokens if there is none."""
        for index in range(begin, len(token_ids)):
            self._recent.append(token_ids[index])
            counts = not self._in_reasoning()
            if counts and any(_ends_with(self._recent, start) for start in self._starts):
                self._recent.clear()
                self.is_free = self.bans_stop = False
                return index + 1
            del self._recent[: -self._longest_start]
        return len(token_ids)

    def _in_reasoning(self) -> bool:
        """Whether the last token is part of reasoning or a mark of it, where no start counts."""
        if self._marks is None:
            return False
        mark = self._marks.closes if self._is_reasoning else self._marks.opens
        if mark and _ends_with(self._recent, mark):
            self._is_reasoning = not self._is_reasoning
            self._recent.clear()
            return True
        return self._is_reasoning

    def _constraining(self) -> Matcher:
        if self._matcher is None:
            self._matcher = self._new_matcher()
        return self._matcher

    def _free_at_end(self) -> None:
        if self._repeats and self._constraining().is_complete:
            self.is_free, self._matcher = True, None


def _ends_with(token_ids: list[int], start: tuple[int, ...]) -> bool:
    return token_ids[-1] == start[-1] and tuple(token_ids[-len(start) :]) == start
