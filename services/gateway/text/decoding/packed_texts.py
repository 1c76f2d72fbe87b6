"""Stores texts by number in one piece of memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import cached_property

import msgspec

_NONE = b"\xff"  # no text of UTF-8
MAX_BYTES = 2**32 - 1
MAX_RECENT = 8192  # 1 MB


class PackedTexts(msgspec.Struct, frozen=True, dict=True, array_like=True):
    """4 bytes and the text for each number, which costs a message nothing to encode or decode.
    `ends`: of the texts in `data`, as 32-bit numbers of this machine.
    """

    data: bytes = b""
    ends: bytes = b""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str | None:
        """Returns None for a number without a text, or beyond the last."""
        ends = self._ends
        if not 0 <= number < len(ends):
            return None
        text = self.data[ends[number - 1] if number else 0 : ends[number]]
        return None if text == _NONE else text.decode()

    @cached_property
    def _ends(self) -> memoryview:
        return memoryview(self.ends).cast("I")


class RecentTexts(dict[int, str | None]):
    """Caches the MAX_RECENT texts read last, at the speed of a dict."""

    def __init__(self, read: Callable[[int], str | None]) -> None:
        self._read = read

    def __missing__(self, number: int) -> str | None:
        if len(self) >= MAX_RECENT:
            self.clear()
        text = self[number] = self._read(number)
        return text


def packed(texts: Iterable[str | None]) -> PackedTexts:
    """Packs texts. Raises OverflowError for more than MAX_BYTES."""
    data, ends = bytearray(), array("I")
    for text in texts:
        data += _NONE if text is None else text.encode()
        ends.append(len(data))
    return PackedTexts(bytes(data), ends.tobytes())
