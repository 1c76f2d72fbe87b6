"""The exceptions that a decoder raises for bytes from outside this process.

msgspec raises its own errors, except for text that is not UTF-8 (UnicodeDecodeError) and for values
that are nested too deep (RecursionError).
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def one_line(error: Exception) -> str:
    """Returns the error's message on one line, for use within another message."""
    return " ".join(str(error).split()) or type(error).__name__
