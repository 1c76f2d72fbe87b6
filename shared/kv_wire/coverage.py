"""Computes which tokens of a shard have arrived, if each sender pushes a part of it. Pure.

Parts are disjoint, and the tokens of each arrive in order. A token is held once all parts have it.
"""

from __future__ import annotations

from shared.kv_layout import KvShard


class Coverage:
    """Tokens of one group that have arrived at one receiver: `shard` counts the group's layers.
    Tokens before `first_token` are held already; `end` is the number of tokens to hold. An empty
    shard holds all.
    """

    def __init__(self, shard: KvShard, *, first_token: int, end: int) -> None:
        self._shard = shard
        self._first_token = first_token if shard.num_cells else end
        self._end = end
        self._taken: dict[KvShard, int] = {}  # tokens by part, with those that are being written
        # by part, the first ones of the latter, and of those that could not be written
        self._written_from: dict[KvShard, set[int]] = {}
        self._num_free_cells = shard.num_cells
        self.num_held_tokens = self._first_token

    def next_token(self, part: KvShard) -> int | None:
        """Returns the token with which the part continues. None for a part outside of the shard, or
        one that overlaps another part.
        """
        if (taken := self._taken.get(part)) is not None:
            return taken
        is_inside = part.num_cells and part.crossing(self._shard) == part
        overlaps = any(part.crossing(each).num_cells for each in self._taken)
        return self._first_token if is_inside and not overlaps else None

    def take(self, part: KvShard, num_tokens: int) -> int:
        """Records that the next tokens of a part are being written. Returns the first one."""
        if part not in self._taken:
            self._taken[part], self._written_from[part] = self._first_token, set()
            self._num_free_cells -= part.num_cells
        first = self._taken[part]
        self._taken[part] += num_tokens
        self._written_from[part].add(first)
        return first

    def hold(self, part: KvShard, first_token: int) -> None:
        """Records that the tokens that were taken from this one on are written. No later ones are
        held until then.
        """
        self._written_from[part].remove(first_token)
        if not self._num_free_cells:
            self.num_held_tokens = min(map(self._held, self._taken))

    def _held(self, part: KvShard) -> int:
        return min(self._written_from[part], default=self._taken[part])

    @property
    def is_complete(self) -> bool:
        return self.num_held_tokens == self._end
