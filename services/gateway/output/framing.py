"""The separation of events by transport: server-sent events over HTTP, lines over NATS.

The common part of events that differ in one text is encoded once: most events of a response are
a token's text in the same envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = "\ufdd0text\ufdd1"
# Python's `str.splitlines`, and so httpx, end lines at these characters too, which JSON does not
# escape. A client that reads lines would otherwise get half an event.
_LINE_ENDS = tuple((each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029")
_ENCODED_MARK = _encode(_MARK)


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes around events: `before` and `after` enclose each event, `done` follows the last
    one. `name_line` is a %-format for the line that names an event.
    """

    before: bytes
    after: bytes
    done: bytes
    name_line: bytes = b""

    def named(self, name: str) -> Framing:
        """Returns the framing of one kind of event, for a dialect that names its events and has no
        `done`.
        """
        line = self.name_line % name.encode() if self.name_line else b""
        return replace(self, before=line + self.before, done=b"", name_line=b"")

    def event(self, body: Any) -> bytes:
        return self.before + on_one_line(_encode(body)) + self.after


def on_one_line(encoded: bytes) -> bytes:
    """Returns JSON in which Unicode's line ends are escaped."""
    if not encoded.isascii():
        for line_end, escaped in _LINE_ENDS:
            encoded = encoded.replace(line_end, escaped)
    return encoded


SSE = Framing(b"data: ", b"\n\n", b"data: [DONE]\n\n", b"event: %b\n")
LINES = Framing(b"", b"\n", b"")


class TextEvent:
    """Encodes the events `body_of(text)` of several texts. No other field may depend on the text.
    No client-controlled text may follow the text field; earlier fields may hold any text.
    """

    def __init__(self, framing: Framing, body_of: Callable[[str], Any]) -> None:
        self._head, _, self._tail = framing.event(body_of(_MARK)).rpartition(_ENCODED_MARK)
        self._between = self._tail + self._head

    def of(self, texts: Sequence[str]) -> bytes:
        """Returns one event per text."""
        if not texts:
            return b""
        encoded = on_one_line(self._between.join(map(_encode, texts)))
        return b"%b%b%b" % (self._head, encoded, self._tail)
