"""Server-sent events, encoded. Of an event that differs in one text only, the rest is encoded once:
most events of most answers are a token's text in the same envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = "\ufdd0text\ufdd1"
_ENCODED_MARK = _encode(_MARK)

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class TextEvent:
    """`body_of(text)` with each of some texts, of which no other field may depend on it.

    The text is the last field of its kind: what stands before it may hold whatever a caller wrote.
    """

    def __init__(self, body_of: Callable[[str], Any]) -> None:
        self._head, _, self._tail = event(body_of(_MARK)).rpartition(_ENCODED_MARK)
        self._between = self._tail + self._head

    def of(self, texts: Sequence[str]) -> bytes:
        """An event for each."""
        if not texts:
            return b""
        return b"%b%b%b" % (self._head, self._between.join(map(_encode, texts)), self._tail)
