"""Which slots hold which block, in many small dictionaries by the first byte of the hash.

One dictionary of millions of blocks would be copied whole when it grows, and its keys be listed
whole by who changes it meanwhile: each would hold the event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

NUM_PARTS = 256


class BlockMasks:
    """Maps a block's hash to a bit mask of slots."""

    def __init__(self) -> None:
        self.parts: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]  # by the first byte

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part_of(self, block_hash: bytes) -> dict[bytes, int]:
        return self.parts[block_hash[0]]

    def get(self, block_hash: bytes, default: int = 0) -> int:
        return self.parts[block_hash[0]].get(block_hash, default)

    def hashes(self) -> Iterator[bytes]:
        """Yields all hashes. Blocks may come and go meanwhile; a new one may not be met."""
        for part in self.parts:
            yield from list(part)
