"""A rank's part of the KV cache, under the layers and heads of the whole model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from shared.engine.kv.kv_copies import KvCopies
from shared.engine.step import KvMemory, KvRun
from shared.kv_layout import KvLayout, KvShard
from shared.kv_wire.link import PageLock
from shared.kv_wire.shards import in_groups
from shared.numerics import Numerics


class CopyThread:
    """A `KvMemory` of what a process holds, whose copies run on one thread."""

    page_lock: PageLock | None = None

    def __init__(self, copies: KvCopies, numerics: Numerics) -> None:
        self.kv_layout = copies.kv_layout
        self.numerics = numerics
        self._copies = copies
        self._thread = ThreadPoolExecutor(1, "rank-copy")

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._copies.read_kv, run, out
        )

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._copies.write_kv, run, payload
        )


class RankKvMemory:
    """A `KvMemory` that holds `shard`, in `held`. `kv_layout` is that of the whole model."""

    def __init__(self, held: KvMemory, kv_layout: KvLayout, shard: KvShard) -> None:
        self.kv_layout = kv_layout
        self.numerics = held.numerics
        self.page_lock = held.page_lock
        self.shard = shard
        self._memory = held
        self._held = in_groups(kv_layout, shard)

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        await self._memory.read_kv(self._own(run), out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        await self._memory.write_kv(self._own(run), payload)

    def _own(self, run: KvRun) -> KvRun:
        """Returns the run counted from the rank's first layer of the group and its first head.

        A run without a shard covers all that a rank with the whole group holds.
        """
        if run.shard is None:
            return run
        return replace(run, shard=run.shard.relative_to(self._held[run.group]))
