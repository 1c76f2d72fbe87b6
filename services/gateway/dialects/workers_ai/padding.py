"""Events of a stream with padding, so that their sizes do not show how long the tokens are.

    {"response": "Hel", "p": "abcdefghijk"}

Whoever sees the sizes of encrypted records could guess the text from them. A text is padded to a
multiple of WIDTH bytes, then by a random number of bytes below WIDTH, so texts of up to WIDTH
encoded bytes, as almost all tokens are, have sizes of one distribution.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import msgspec

from services.gateway.output.framing import Framing, on_one_line

_encode = msgspec.json.Encoder().encode

WIDTH = 32  # a power of two, so that a random byte modulo WIDTH is uniform
# Bytes of one system call: a call for each event would take longer than its encoding.
DRAWN_BYTES = 4096
LETTERS = (string.ascii_lowercase + string.digits) * 2
_TEXT, _PADDING = "\ufdd0text\ufdd1", "\ufdd0padding\ufdd1"


class PaddedFrame(msgspec.Struct, frozen=True):
    response: str
    p: str


class PaddedTextEvent:
    """Encodes events that hold one text each. `random_bytes(n)`: returns n random bytes."""

    def __init__(self, framing: Framing, random_bytes: Callable[[int], bytes]) -> None:
        event = framing.event(PaddedFrame(_TEXT, _PADDING))
        self._head, _, rest = event.partition(_encode(_TEXT))
        between, _, end = rest.partition(_encode(_PADDING))
        paddings = (LETTERS[:length].encode() for length in range(2 * WIDTH - 1))
        self._tails = [b'%b"%b"%b' % (between, each, end) for each in paddings]
        self._random_bytes = random_bytes
        self._draws = b""  # random bytes, of which each is used once
        self._num_drawn = 0

    def of(self, texts: Sequence[str]) -> bytes:
        """Returns one event per text."""
        first = self._draw(len(texts))
        draws, head, tails = self._draws, self._head, self._tails
        parts: list[bytes] = []
        for place, text in enumerate(texts, first):
            encoded = on_one_line(_encode(text))
            parts += (head, encoded, tails[-len(encoded) % WIDTH + draws[place] % WIDTH])
        return b"".join(parts)

    def _draw(self, count: int) -> int:
        """Returns the place of the first of `count` unused random bytes."""
        first = self._num_drawn
        if first + count > len(self._draws):
            self._draws, first = self._random_bytes(max(count, DRAWN_BYTES)), 0
        self._num_drawn = first + count
        return first
