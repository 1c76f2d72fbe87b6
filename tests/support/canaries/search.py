"""Finds canaries in bytes: every window of every form of thousands of tenants in one pass.

    data ──8 alignments──▶ pairs of 64-bit words ──hash──▶ table of booleans ──▶ few candidates
                         their hashes in the sorted ones, and their bytes as well ──▶ sightings

The table rules out nearly all positions; a sighting is always exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.canaries.canary import WINDOW, Canary

WORD = 8
BITS = 23  # of the table: eight million positions, of which a window takes one
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(64 - BITS)
_GAP = bytes(WINDOW)  # between two pieces, so that none begins in one and ends in the next

Positions = NDArray[np.int64]


class Sighting(NamedTuple):
    """Something of a tenant, where it begins."""

    tenant_id: str
    form: str
    start: int


class CanarySearch:
    def __init__(self, canaries: Iterable[Canary] = ()) -> None:
        self._windows: dict[bytes, int] = {}  # to the number of its owner
        self._owners: dict[tuple[str, str], int] = {}  # numbers of tenants and forms
        self._table = np.zeros(1 << BITS, dtype=np.bool_)
        self._hashes = np.zeros(0, dtype=np.uint64)  # of all windows, sorted
        self._numbers = np.zeros(0, dtype=np.int32)  # of the owners, in the order of the hashes
        self.add(canaries)

    def copy(self) -> CanarySearch:
        found = CanarySearch()
        found._windows, found._owners = dict(self._windows), dict(self._owners)
        found._table = self._table.copy()
        found._hashes, found._numbers = self._hashes, self._numbers
        return found

    def add(self, canaries: Iterable[Canary]) -> None:
        """A window that two forms share is the first one's."""
        added: dict[bytes, int] = {}
        for canary in canaries:
            for form in canary.forms():
                owner = (canary.tenant_id, form.name)
                number = self._owners.setdefault(owner, len(self._owners))
                added |= {
                    window: number
                    for window in form.windows()
                    if window not in added and window not in self._windows
                }
        self._windows |= added
        hashes = _hashes(b"".join(added), 2)
        order = np.argsort(hashes)
        numbers = np.fromiter(added.values(), dtype=np.int32, count=len(added))
        places = np.searchsorted(self._hashes, hashes[order])
        self._table[hashes >> _SHIFT] = True
        self._hashes = np.insert(self._hashes, places, hashes[order])
        self._numbers = np.insert(self._numbers, places, numbers[order])

    def find(self, data: bytes | bytearray) -> list[Sighting]:
        """Returns the first sighting of each form of each tenant."""
        return [sighting for _, sighting in self.find_in(data, (0,))]

    def find_in(self, data: bytes | bytearray, starts: Sequence[int]) -> list[tuple[int, Sighting]]:
        """Returns the first sighting of each form of each tenant in each piece of the data, after
        the number of the piece. `starts` are those of the pieces.
        """
        positions, numbers = self._marked(data)
        pieces = np.searchsorted(np.array(starts), positions, side="right") - 1
        keys = pieces * len(self._owners) + numbers
        owners, found = list(self._owners), {}
        for key, start in zip(keys.tolist(), positions.tolist(), strict=True):
            if start < found.get(key, len(data)) and self._is_window(data, start, key):
                found[key] = start
        return [
            (key // len(owners), Sighting(*owners[key % len(owners)], start))
            for key, start in found.items()
        ]

    def _is_window(self, data: bytes | bytearray, start: int, key: int) -> bool:
        number = self._windows.get(bytes(data[start : start + WINDOW]))
        return number is not None and number == key % len(self._owners)

    def _marked(self, data: bytes | bytearray) -> tuple[Positions, NDArray[np.int32]]:
        """Returns where windows seem to be, and their owners."""
        positions, numbers = [], []
        for alignment in range(WORD):
            hashes = _hashes(memoryview(data)[alignment:], 1)
            indices = np.flatnonzero(self._table[hashes >> _SHIFT])
            marked = hashes[indices]
            nearest = np.searchsorted(self._hashes, marked)
            nearest[nearest == len(self._hashes)] = 0
            is_known = self._hashes[nearest] == marked
            positions.append(alignment + WORD * indices[is_known])
            numbers.append(self._numbers[nearest[is_known]])
        return np.concatenate(positions), np.concatenate(numbers)


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
        found = search.find_in(bytes(self._data), self._starts)
        notes, self._notes = self._notes, []
        self._data, self._starts = bytearray(), []
        return [(notes[number], each) for number, each in found]


def _hashes(data: bytes | memoryview, step: int) -> NDArray[np.uint64]:
    """Hashes each pair of neighbouring words; with `step` 2 pairs do not overlap."""
    words = np.frombuffer(data, dtype="<u8", count=len(data) // WORD)
    hashed: NDArray[np.uint64] = words[:-1:step] * _FIRST ^ words[1::step] * _SECOND
    return hashed
