from __future__ import annotations

from random import Random


class SeededRandomness:
    """The same random numbers in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def bytes(self, num_bytes: int) -> bytes:
        return self._random.randbytes(num_bytes)

    def below(self, limit: int) -> int:
        return self._random.randrange(limit)
