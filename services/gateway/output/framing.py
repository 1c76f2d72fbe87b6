"""How a transport separates events: server-sent events over HTTP, lines over NATS.

For events that differ in one text only, the rest is encoded once: most events of most responses are
a token's text in the same envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = "\ufdd0text\ufdd1"
# Where Python's `str.splitlines`, and so the lines of httpx, end besides at control characters,
# which JSON escapes. A client that reads a stream by such lines would get half an event.
_LINE_ENDS = tuple((each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029")
_ENCODED_MARK = _encode(_MARK)


@dataclass(frozen=True, slots=True)
class Framing:
    """`before`, `after`: what surrounds an event. `done`: after the last one. `name_line`: a format
    of the line that names an event.
    """

    before: bytes
    after: bytes
    done: bytes
    name_line: bytes = b""

    def named(self, name: str) -> Framing:
        """The framing of one kind of event, of a dialect that names them and has no `done`."""
        line = self.name_line % name.encode() if self.name_line else b""
        return replace(self, before=line + self.before, done=b"", name_line=b"")

    def event(self, body: Any) -> bytes:
        return self.before + on_one_line(_encode(body)) + self.after


def on_one_line(encoded: bytes) -> bytes:
    """Escapes the line ends of Unicode in JSON."""
    if not encoded.isascii():
        for line_end, escaped in _LINE_ENDS:
            encoded = encoded.replace(line_end, escaped)
    return encoded


SSE = Framing(b"data: ", b"\n\n", b"data: [DONE]\n\n", b"event: %b\n")
LINES = Framing(b"", b"\n", b"")


class TextEvent:
    """Encodes `body_of(text)` for several texts; no other field may depend on the text.

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
