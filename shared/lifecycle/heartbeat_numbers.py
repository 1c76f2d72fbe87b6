"""The epoch and sequence numbers of one start of a process, for all that sends its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from shared.randomness import Randomness


@dataclass(slots=True)
class HeartbeatNumbers:
    epoch: int
    last: int = 0  # sequence number of the last heartbeat

    @classmethod
    def random(cls, randomness: Randomness) -> Self:
        return cls(int.from_bytes(randomness.bytes(7), "little"))

    def take(self) -> int:
        """Returns the next sequence number."""
        self.last += 1
        return self.last
