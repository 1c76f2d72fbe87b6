"""Stop strings over a text that arrives in pieces.

A match is the one that *completes* first; of those that complete together, the longest. The result
does not depend on where the pieces are cut. Text from the start of the match on is never given
out, nor is a tail that may yet become one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Fed with text, gives back what is safe to show. Strings must not be empty."""

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
        """The held-back tail, once it is known that nothing follows."""
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
        """Length of the longest tail of `text` that begins some stop string."""
        longest = 0
        for each in self._strings:
            for length in range(min(len(each) - 1, len(text)), longest, -1):
                if text.endswith(each[:length]):
                    longest = length
                    break
        return longest
