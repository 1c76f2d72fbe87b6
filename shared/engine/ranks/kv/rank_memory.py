"""A rank's part of the KV cache, under the layers and heads of the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shared.engine.kv_copies import KvCopies
from shared.kv_layout import KvLayout, KvShard
from shared.kv_wire.shards import in_groups
from shared.numerics import Numerics


class RankMemory:
    """A `KvMemory`, which holds `shard`. `kv_layout`: of the whole model."""

    def __init__(
        self, copies: KvCopies, kv_layout: KvLayout, shard: KvShard, numerics: Numerics
    ) -> None:
        self.kv_layout = kv_layout
        self.numerics = numerics
        self.shard = shard
        self._copies = copies
        self._held = in_groups(kv_layout, shard)
        self._thread = ThreadPoolExecutor(1, "rank-copy")

    async def read_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        out: memoryview,
        group: int = 0,
        shard: KvShard | None = None,
    ) -> None:
        run = block_table, first_token, num_tokens, out, group, self._own(group, shard)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._copies.read_kv, *run)

    async def write_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        group: int = 0,
        shard: KvShard | None = None,
    ) -> None:
        run = block_table, first_token, num_tokens, payload, group, self._own(group, shard)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._copies.write_kv, *run)

    def _own(self, group: int, shard: KvShard | None) -> KvShard | None:
        """Counted from the rank's first layer of the group, and its first head. None, the whole
        group, is all that a rank has which holds the whole group.
        """
        return None if shard is None else shard.relative_to(self._held[group])
