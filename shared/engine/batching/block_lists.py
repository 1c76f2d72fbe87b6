"""Lists of findable blocks, which indexes read in pages: each shows the state at its first page.

Several replicas of an index may list the same worker at once: a cursor names its list, so that one
is not continued in that of another, where the blocks are at other places.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.batching.cached_block import CachedBlock
from shared.errors import WorkerBusy

BLOCKS_PER_PAGE = 20_000
MAX_LISTS = 16  # that are not read to their ends; the oldest is forgotten
MAX_BLOCKS = 1 << 26  # of one list


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks as of an event's number."""

    sequence_number: int
    blocks: list[CachedBlock]


class BlockLists:
    def __init__(self) -> None:
        self._lists: dict[int, BlockList] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._lists)

    def add(self, blocks: BlockList) -> int:
        """Returns the cursor of its first page."""
        self._last += 1
        self._lists[self._last] = blocks
        if len(self._lists) > MAX_LISTS:
            del self._lists[next(iter(self._lists))]
        return self._last * MAX_BLOCKS

    def page(self, cursor: int) -> tuple[BlockList, int | None]:
        """Returns the blocks of a page, and the cursor of the next one, or None after the last.
        Raises WorkerBusy for a list that is forgotten: it begins again.
        """
        number, first = divmod(cursor, MAX_BLOCKS)
        found = self._lists.get(number)
        if found is None:
            raise WorkerBusy("this list of blocks is forgotten")
        end = first + BLOCKS_PER_PAGE
        page = BlockList(found.sequence_number, found.blocks[first:end])
        if end < len(found.blocks):
            return page, cursor + BLOCKS_PER_PAGE
        del self._lists[number]
        return page, None
