"""Encodes server-sent events. For events that differ in one text only, the rest is encoded once:
most events of most responses are a token's text in the same envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = "\ufdd0text\ufdd1"
_ENCODED_MARK = _encode(_MARK)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment


def event(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class TextEvent:
    """Encodes `body_of(text)` for several texts; no other field may depend on the text.

    No client-controlled text may follow the text field; earlier fields may hold any text.
    """

    def __init__(self, body_of: Callable[[str], Any]) -> None:
        self._head, _, self._tail = event(body_of(_MARK)).rpartition(_ENCODED_MARK)
        self._between = self._tail + self._head

    def of(self, texts: Sequence[str]) -> bytes:
        """Returns one event per text."""
        if not texts:
            return b""
        return b"%b%b%b" % (self._head, self._between.join(map(_encode, texts)), self._tail)
