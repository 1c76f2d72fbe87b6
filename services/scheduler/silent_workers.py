"""Closes workers that leave starts unanswered, for this scheduler only. No I/O.

open ──MAX_SILENT_STARTS in a row──▶ closed for FIRST_CLOSED_S ──over──▶ on trial
  ▲                                        ▲                               │ │
  │              one silent start: closed for twice as long, at most MAX_CLOSED_S
  │                                        └───────────────────────────────┘ │
  └── any reply, also a late one or a rejection ─────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

MAX_SILENT_STARTS = 3
FIRST_CLOSED_S = 2.5
MAX_CLOSED_S = 10.0


@dataclass(slots=True)
class _Silence:
    num_starts: int = 0
    last_at: float = -inf
    closed_s: float = 0.0
    closed_until: float = -inf


class SilentWorkers:
    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}

    def record(self, worker_id: str, sent_at: float, now: float) -> float | None:
        """Records a start without a reply. Returns for how many seconds that closes the worker.

        Only starts that were sent after the last one had failed count as further ones in a row.
        """
        silence = self._silences.setdefault(worker_id, _Silence())
        if sent_at < silence.last_at:
            return None
        silence.last_at = now
        silence.num_starts += 1
        if silence.num_starts < MAX_SILENT_STARTS:
            return None
        silence.closed_s = min(max(2 * silence.closed_s, FIRST_CLOSED_S), MAX_CLOSED_S)
        silence.closed_until = now + silence.closed_s
        return silence.closed_s

    def forget(self, worker_id: str) -> None:
        """Opens a worker that has replied or left, and forgets its silent starts."""
        self._silences.pop(worker_id, None)

    def closed(self, now: float) -> set[str]:
        return {name for name, each in self._silences.items() if now < each.closed_until}

    def silent(self) -> set[str]:
        """Returns the workers that left their last start unanswered, closed or not."""
        return set(self._silences)
