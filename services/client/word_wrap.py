"""Word wrap of text that is shown in a terminal while it comes in. No I/O."""

from __future__ import annotations

from rich.cells import cell_len

TAB = 8


class WordWrap:
    """Breaks lines of `width` cells between words. A word is shown as far as it has come; if it
    does not fit, it is erased and begins again on the next line.
    """

    def __init__(self, width: int) -> None:
        self._limit = max(width - 1, 1)  # a full line leaves the cursor on its last cell
        self._column = 0
        self._word = ""  # as far as it has come

    def wrap(self, text: str) -> str:
        """Returns what to write for the next part of the text."""
        return "".join(map(self._next, text))

    def _next(self, char: str) -> str:
        if char == "\n":
            return self._begin_line("\n", "")
        size = TAB - self._column % TAB if char == "\t" else cell_len(char)
        if self._column + size > self._limit:
            return self._break(char)
        self._column += size
        self._word = self._word + char if _is_in_word(char) else ""
        return char

    def _break(self, char: str) -> str:
        """Moves the word to the next line, unless it fills one."""
        if char.isspace():
            return self._begin_line("\n", "")
        num_shown = cell_len(self._word)
        if not num_shown or num_shown == self._column or not _is_in_word(char):
            return self._begin_line("\n", char)
        return self._begin_line(f"\x1b[{num_shown}D\x1b[K\n", self._word + char)

    def _begin_line(self, before: str, word: str) -> str:
        self._column = cell_len(word)
        self._word = word if all(map(_is_in_word, word)) else ""
        return before + word


def _is_in_word(char: str) -> bool:
    """Whether no line may break after it. Scripts of wide characters have no spaces."""
    return not char.isspace() and cell_len(char) < 2
