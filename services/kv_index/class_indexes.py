"""One index for the blocks without a region class, and one for those of each class of this process.

A class is apart from the others: its blocks come and go in messages of their own, with numbers of
their own, and only matches of the class look them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.kv_index.index import PrefixIndex, SyncState
from shared.messages import PrefixMatch, PrefixMatches


class ClassIndexes:
    def __init__(self, region_classes: Iterable[str] = ()) -> None:
        self.plain = PrefixIndex()
        self._by_class = {"": self.plain, **{each: PrefixIndex() for each in region_classes}}

    def of(self, region_class: str) -> PrefixIndex:
        """Returns the index of a class of this process, or of blocks without one for ""."""
        return self._by_class[region_class]

    def items(self) -> Iterator[tuple[str, PrefixIndex]]:
        yield from self._by_class.items()

    @property
    def num_blocks(self) -> int:
        return sum(each.num_blocks for each in self._by_class.values())

    @property
    def num_inexact_workers(self) -> int:
        """Workers of which some blocks are not known exactly."""
        return max(each.num_inexact_workers for each in self._by_class.values())

    def holds(self, worker_id: str, block_hash: bytes) -> bool:
        return any(each.holds(worker_id, block_hash) for each in self._by_class.values())

    def is_exact(self, worker_id: str) -> bool:
        """Whether all blocks of the worker are known."""
        states = [each.state_of(worker_id) for each in self._by_class.values()]
        return states[0] is not None and all(each in (None, SyncState.EXACT) for each in states)

    def sweep(self, max_blocks: int) -> None:
        for each in self._by_class.values():
            each.sweep(max_blocks)

    def match(
        self,
        region_class: str,
        block_hashes: list[bytes],
        model: str,
        revision: str,
        *,
        num_public: int = 0,
    ) -> PrefixMatches:
        """Returns, per worker, how many leading blocks it holds. Of a class, the first `num_public`
        blocks are those of a public prefix, which has none.
        """
        own = self.of(region_class)
        if not region_class or not num_public:
            return own.match(block_hashes, model, revision)
        first = self.plain.match(block_hashes[:num_public], model, revision)
        more = own.match(block_hashes[num_public:], model, revision)
        numbers = {each.worker_id: each.num_blocks for each in more.matches}
        return PrefixMatches(
            state="exact" if first.state == more.state == "exact" else "degraded",
            matches=tuple(_continued(each, numbers, num_public) for each in first.matches),
        )


def _continued(match: PrefixMatch, numbers: dict[str, int], num_public: int) -> PrefixMatch:
    if match.num_blocks < num_public:
        return match
    num_blocks = num_public + numbers.get(match.worker_id, 0)
    return PrefixMatch(worker_id=match.worker_id, num_blocks=num_blocks)
