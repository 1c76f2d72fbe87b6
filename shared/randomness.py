"""The randomness seam: all ids and seeds come from here, so a simulation can fix them."""

from __future__ import annotations

import os
import secrets
from typing import Protocol


class Randomness(Protocol):
    def bytes(self, num_bytes: int) -> bytes: ...

    def below(self, limit: int) -> int:
        """Returns a uniform integer in [0, limit)."""
        ...


class SystemRandomness:
    def bytes(self, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)

    def below(self, limit: int) -> int:
        return secrets.randbelow(limit)
