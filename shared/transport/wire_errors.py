"""The exceptions that a decoder raises for bytes from outside this process, as lines of text.

msgspec raises its own errors, except for text that is not UTF-8 (UnicodeDecodeError) and for values
that are nested too deep (RecursionError).
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def one_line(error: Exception) -> str:
    """Returns the error's message on one line, for use within another message."""
    return " ".join(str(error).split()) or type(error).__name__


def printable_line(text: str, max_chars: int) -> str:
    """Returns the beginning of a text, which anybody may have written, on one line."""
    printable = "".join(char if char.isprintable() else " " for char in text[: 4 * max_chars])
    return " ".join(printable.split())[:max_chars]
