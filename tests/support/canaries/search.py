"""Finds canaries in bytes: every window of every form of thousands of tenants in one pass.

    data ──8 alignments──▶ pairs of 64-bit words ──hash──▶ table of booleans ──▶ few candidates
                         their hashes in the sorted ones, and their bytes as well ──▶ sightings

The table rules out nearly all positions; a sighting is always exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.canaries.canary import WINDOW, Canary

WORD = 8
BITS = 23  # of the table: eight million positions, of which a window takes one
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(64 - BITS)
_GAP = bytes(WINDOW)  # between two pieces, so that none begins in one and ends in the next


class Sighting(NamedTuple):
    """Something of a tenant, where it begins."""

    tenant_id: str
    form: str
    start: int


class CanarySearch:
    def __init__(self, canaries: Iterable[Canary] = ()) -> None:
        self._owners: dict[bytes, tuple[str, str]] = {}
        self._table = np.zeros(1 << BITS, dtype=np.bool_)
        self._hashes = np.zeros(0, dtype=np.uint64)  # of all windows, sorted
        self._add(canaries)

    def add(self, canary: Canary) -> None:
        self._add((canary,))

    def _add(self, canaries: Iterable[Canary]) -> None:
        """A window that two forms share is the first one's."""
        windows = []
        for canary in canaries:
            for form in canary.forms():
                for window in form.windows():
                    self._owners.setdefault(window, (canary.tenant_id, form.name))
                    windows.append(window)
        added = _hashes(b"".join(windows), 2)
        self._table[added >> _SHIFT] = True
        self._hashes = np.union1d(self._hashes, added)

    def find(self, data: bytes | bytearray) -> list[Sighting]:
        """Returns all sightings, in no order."""
        found = []
        for alignment in range(WORD):
            for index in self._candidates(_hashes(data[alignment:], 1)).tolist():
                start = alignment + index * WORD
                owner = self._owners.get(bytes(data[start : start + WINDOW]))
                if owner is not None:
                    found.append(Sighting(*owner, start))
        return found

    def _candidates(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the indices of the hashes that a window has, too."""
        places = np.flatnonzero(self._table[hashes >> _SHIFT])
        marked = hashes[places]
        nearest = np.searchsorted(self._hashes, marked)
        nearest[nearest == len(self._hashes)] = 0
        found: NDArray[np.int64] = places[self._hashes[nearest] == marked]
        return found


class Pieces:
    """Many short pieces that are searched together; each has a note of where it was found."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._starts: list[int] = []
        self._notes: list[object] = []

    def __len__(self) -> int:
        return len(self._data)

    def add(self, note: object, data: bytes) -> None:
        self._starts.append(len(self._data))
        self._notes.append(note)
        self._data += data
        self._data += _GAP

    def take(self, search: CanarySearch) -> list[tuple[object, Sighting]]:
        """Searches all pieces, and removes them. Returns notes and sightings."""
        found = [
            (self._notes[bisect_right(self._starts, each.start) - 1], each)
            for each in search.find(self._data)
        ]
        self._data, self._starts, self._notes = bytearray(), [], []
        return found


def _hashes(data: bytes | bytearray, step: int) -> NDArray[np.uint64]:
    """Hashes each pair of neighbouring words; with `step` 2 pairs do not overlap."""
    words = np.frombuffer(data, dtype="<u8", count=len(data) // WORD)
    hashed: NDArray[np.uint64] = words[:-1:step] * _FIRST ^ words[1::step] * _SECOND
    return hashed
