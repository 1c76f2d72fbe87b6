"""Bytes from outside of this process may be anything: what their decoders raise.

msgspec answers with errors of its own, but lets through that text is not UTF-8 and that values are
nested without end.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def one_line(error: Exception) -> str:
    """What it says, as it may stand within a message of one line."""
    return " ".join(str(error).split()) or type(error).__name__
