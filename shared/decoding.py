"""Bytes from outside of this process may be anything: what their decoders raise.

msgspec answers with errors of its own, but lets through that text is not UTF-8 and that values are
nested without end.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
