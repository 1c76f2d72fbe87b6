"""Finds stop strings in a text that arrives in pieces.

The match that *completes* first wins; of matches that complete together, the longest. The result
does not depend on the piece boundaries. Neither text from the start of a match on nor a tail that
may become a match is returned.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Takes text and returns the part that is safe to show. Stop strings must not be empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that can no longer be part of a match; nothing after a match."""
        if self.matched is not None or not text:
            return ""
        if not self._strings:
            return text
        text = self._held + text
        start = self._find(text)
        if start is None:
            start = len(text) - self._num_held(text)
            self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Returns the buffered tail at the end of the text; empty after a match."""
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
        longest = 0
        for each in self._strings:
            for length in range(min(len(each) - 1, len(text)), longest, -1):
                if text.endswith(each[:length]):
                    longest = length
                    break
        return longest
