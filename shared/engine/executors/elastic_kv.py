"""Changes the size of an engine's KV cache while its loop runs, and gives memory back.

    grow     the executor has the memory ──▶ the pool has the blocks
    shrink   the pool retires blocks ──▶ released and zeroed, if required ──▶ their memory goes back

Blocks that running sequences hold go back as they are released. One change happens at a time, so
that a block is never given back after it was added again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shared.engine.engine import Engine
from shared.engine.executors.executor import Executor
from shared.errors import InvalidRequest


class ElasticKv:
    def __init__(
        self, engine: Engine, executor: Executor, zero_freed: Callable[[], Awaitable[None]]
    ) -> None:
        """Changes the size of the KV cache while the engine runs. `zero_freed` returns once all
        blocks freed so far are zeroed, if the engine requires it.

        An executor that is not elastic changes the size only from 0 and to 0.
        """
        self._engine = engine
        self._executor = executor
        self._zero_freed = zero_freed
        self._changing = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, including those that are about to retire."""
        pool = self._engine.pool
        num_blocks = pool.num_blocks + pool.num_retiring_blocks
        return num_blocks * self._executor.kv_layout.block_bytes

    async def resize(self, num_bytes: int) -> None:
        """Changes the cache to as many blocks as `num_bytes` hold. Raises InvalidRequest for a size
        outside of the engine's and executor's bounds, or one that the executor cannot change to
        now; NoCapacity if the device has too little memory; ValueError for 0 while sequences are
        left.
        """
        num_blocks = num_bytes // self._executor.kv_layout.block_bytes
        if num_bytes and not num_blocks:
            raise InvalidRequest(
                f"kv_bytes {num_bytes} hold no block of {self._executor.kv_layout.block_bytes}",
                param="kv_bytes",
            )
        if num_blocks > self._executor.max_blocks:
            most = self._executor.max_blocks * self._executor.kv_layout.block_bytes
            raise InvalidRequest(
                f"kv_bytes {num_bytes} is more than this worker's ceiling of {most}: start it with "
                "a larger kv_ceiling_bytes",
                param="kv_bytes",
            )
        async with self._changing:
            await self._change(num_blocks)

    async def _change(self, num_blocks: int) -> None:
        before = self._engine.pool.num_blocks
        if num_blocks == before:
            return
        if before and num_blocks and not self._executor.is_elastic:
            raise InvalidRequest(
                f"the KV cache of this device has {before} blocks until the worker is parked: park "
                f"it, and wake it with {num_blocks}",
                param="kv_bytes",
            )
        if num_blocks > before:
            self._engine.check_size(num_blocks)
            await self._executor.resize_kv(num_blocks)
            self._engine.resize(num_blocks)
        else:
            self._engine.resize(num_blocks)
            await self._release()
            await self._executor.resize_kv(num_blocks)

    async def give_back(self) -> None:
        """The memory of blocks that have retired."""
        async with self._changing:
            await self._release()

    async def _release(self) -> None:
        retired = self._engine.pool.take_retired()
        if retired:
            await self._zero_freed()
            await self._executor.give_back(retired)
