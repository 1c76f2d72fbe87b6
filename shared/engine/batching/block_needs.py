"""Computes the blocks of each group of layers that a sequence needs. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.kv_layout import Reach, first_seen

# Blocks of a bounded group beside its reach and one step: both ends are rounded to blocks, and
# blocks are dropped when a sequence fills one.
ROUNDING_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """Blocks of a sequence by group of layers. `reaches` has one entry for each group. A group that
    sees all keys has blocks for all tokens of a sequence; a bounded one for those that it still
    sees and for the largest next step.
    """

    reaches: tuple[Reach, ...]
    block_size: int
    max_batch_tokens: int

    def first(self, group: int, position: int) -> int:
        """Returns the first block that the token at `position` and later ones see."""
        return first_seen(self.reaches[group], position) // self.block_size

    def end(self, group: int, num_computed: int, num_tokens: int) -> int:
        """Returns the end of the blocks that the next step may write or read."""
        if self.reaches[group] is not None:
            num_tokens = min(num_tokens, num_computed + self.max_batch_tokens)
        return -(-num_tokens // self.block_size)

    def peak(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` holds at any time,
        over all groups.
        """
        num_blocks = -(-num_tokens // self.block_size)
        return sum(min(num_blocks, self._most(reach, num_blocks)) for reach in self.reaches)

    def _most(self, reach: Reach, num_blocks: int) -> int:
        if reach is None:
            return num_blocks
        num_tokens = reach.tokens + self.max_batch_tokens
        return -(-num_tokens // self.block_size) + ROUNDING_BLOCKS

    def longest(self, num_blocks: int) -> int:
        """Returns the blocks, in each group that sees all keys, of the longest sequence for which
        `num_blocks` suffice; at most `num_blocks`.
        """
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def most_tokens(self, num_blocks: int, limit: int) -> int:
        """Returns the longest sequence, of at most `limit` tokens, that a pool of
        `num_blocks` computes.

        Raises ConfigError if the pool holds less than the largest reach of one sequence.
        """
        num_tokens = min(limit, self.longest(num_blocks) * self.block_size)
        if self.peak(limit) <= num_blocks:
            num_tokens = limit
        largest = max((each.tokens for each in self.reaches if each is not None), default=0)
        if num_tokens < min(largest, limit):
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {self.block_size} tokens holds {num_tokens} "
                f"tokens of a sequence, less than the attention window of {largest}: use a larger "
                "kv_cache_bytes",
                param="kv_cache_bytes",
            )
        return num_tokens
