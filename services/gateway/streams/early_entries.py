"""Placements that do not yet, or no longer, belong to a running stream.

Tokens can overtake the `Placed` of their placement: `EarlyEntries` buffers them, limited in number
and time. `RetiredPlacements` holds the last aborted and finished placements, so that late tokens
are answered rather than mistaken for early ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shared.messages import TokenEntry

EARLY_LIMIT_S = 1.0
MAX_EARLY_ENTRIES = 4096
MAX_EARLY_VALUES = 2_000_000  # token ids and logprobs in all entries
MAX_RETIRED = 16384
ANSWER_EVERY_S = 1.0


@dataclass(slots=True)
class EarlyEntry:
    since: float
    entries: list[TokenEntry] = field(default_factory=list)


class EarlyEntries:
    def __init__(
        self, max_entries: int = MAX_EARLY_ENTRIES, max_values: int = MAX_EARLY_VALUES
    ) -> None:
        self._max_entries, self._max_values = max_entries, max_values
        self._by_placement: OrderedDict[tuple[bytes, str], EarlyEntry] = OrderedDict()
        self._num_entries = 0
        self._num_values = 0

    def __len__(self) -> int:
        return self._num_entries

    def add(self, worker_id: str, entry: TokenEntry, now: float) -> None:
        """Buffers an entry. A full buffer drops the oldest placement's entries; a resend recovers
        them.
        """
        key = entry.placement_id, worker_id
        early = self._by_placement.get(key)
        if early is None:
            early = self._by_placement[key] = EarlyEntry(now)
        early.entries.append(entry)
        self._num_entries += 1
        self._num_values += _num_values(entry)
        while self._num_entries > self._max_entries or self._num_values > self._max_values:
            self.take(*next(iter(self._by_placement)))

    def take(self, placement_id: bytes, worker_id: str) -> list[TokenEntry]:
        early = self._by_placement.pop((placement_id, worker_id), None)
        if early is None:
            return []
        self._num_entries -= len(early.entries)
        self._num_values -= sum(_num_values(entry) for entry in early.entries)
        return early.entries

    def expire(self, now: float) -> list[tuple[bytes, str]]:
        """Removes placements not named within EARLY_LIMIT_S. Returns (placement_id, worker_id)
        pairs.
        """
        expired = []
        while self._by_placement:
            (placement_id, worker_id), early = next(iter(self._by_placement.items()))
            if now - early.since < EARLY_LIMIT_S:
                break
            self.take(placement_id, worker_id)
            expired.append((placement_id, worker_id))
        return expired


def _num_values(entry: TokenEntry) -> int:
    num_values = len(entry.token_ids)
    for each in (*entry.logprobs, *entry.prompt_logprobs):
        num_values += 1 + len(each.top_token_ids)
    return num_values


@dataclass(slots=True)
class Retired:
    is_finished: bool
    answered_at: float


class RetiredPlacements:
    def __init__(self) -> None:
        self._by_placement: OrderedDict[bytes, Retired] = OrderedDict()

    def __contains__(self, placement_id: bytes) -> bool:
        return placement_id in self._by_placement

    def add(self, placement_id: bytes, *, is_finished: bool, now: float) -> None:
        self._by_placement[placement_id] = Retired(is_finished, now)
        if len(self._by_placement) > MAX_RETIRED:
            self._by_placement.popitem(last=False)

    def due_answer(self, placement_id: bytes, now: float) -> bool | None:
        """Returns True to acknowledge a finished placement again, False to abort one again, and
        None if the placement was answered less than ANSWER_EVERY_S ago.
        """
        retired = self._by_placement[placement_id]
        if now - retired.answered_at < ANSWER_EVERY_S:
            return None
        retired.answered_at = now
        return retired.is_finished
