"""The KV cache of a group of ranks, at its leader: a `KvPort` in the layout of the whole model."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.planning.rank_part import RankPart
from shared.engine.ranks.channel import Channel, ChannelClosed
from shared.engine.ranks.group_steps import COMMAND_TIMEOUT_S, GroupSteps
from shared.engine.ranks.messages import (
    Copied,
    CopyFailed,
    CopyReply,
    ReadKv,
    WriteKv,
    ZeroBlocks,
)
from shared.errors import DeviceFailed
from shared.kv_layout import ITEM_BYTES, KvLayout
from shared.numerics import Numerics

T = TypeVar("T")


class GroupKv:
    """`parts`: of each rank, in order; `copies`: a channel to each."""

    def __init__(
        self,
        steps: GroupSteps,
        parts: Sequence[RankPart],
        copies: Sequence[Channel],
        *,
        shape: MeshShape,
        kv_layout: KvLayout,
        numerics: Numerics,
    ) -> None:
        self.kv_layout = kv_layout
        self.numerics = numerics
        self._steps = steps
        self._parts = parts
        self._copied_ranks = _ranks_with_own_heads(shape, parts)
        self._copies = copies
        self._copy_thread = ThreadPoolExecutor(1, "group-copy")

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._steps.command(ZeroBlocks(block_ids))

    async def read_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        out: memoryview,
        group: int = 0,
    ) -> None:
        command = ReadKv(list(block_table), first_token, num_tokens, group)
        await self._on(self._read, command, out)

    async def write_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        group: int = 0,
    ) -> None:
        command = ReadKv(list(block_table), first_token, num_tokens, group)
        await self._on(self._write, command, payload)

    async def close(self) -> None:
        await asyncio.to_thread(self._copy_thread.shutdown)
        for each in self._copies:
            each.close()

    async def _on(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._copy_thread, self._guarded, work, *arguments
        )

    def _guarded(self, work: Callable[..., T], *arguments: Any) -> T:
        """A group without one of its ranks computes nothing more."""
        try:
            return work(*arguments)
        except (ChannelClosed, TimeoutError, msgspec.DecodeError) as error:
            raise DeviceFailed(f"a rank of this worker is lost: {error}") from error

    def _read(self, command: ReadKv, out: memoryview) -> None:
        whole = self._by_head(np.frombuffer(out, np.uint8), command)
        ranks = [each for each in self._copied_ranks if self._layers(each, command.group)]
        for rank in ranks:
            self._copies[rank].send(command)
        for rank in ranks:
            part = self._slices(rank, command.group)
            payload = np.frombuffer(self._copied(rank).payload, np.uint8)
            whole[part] = payload.reshape(whole[part].shape)

    def _write(self, where: ReadKv, payload: memoryview) -> None:
        whole = self._by_head(np.frombuffer(payload, np.uint8), where)
        ranks = [each for each in range(len(self._parts)) if self._layers(each, where.group)]
        for rank in ranks:
            data = whole[self._slices(rank, where.group)].tobytes()
            self._copies[rank].send(WriteKv(where, data))
        for rank in ranks:
            self._copied(rank)

    def _copied(self, rank: int) -> Copied:
        reply: CopyReply = self._copies[rank].receive(CopyReply, COMMAND_TIMEOUT_S)
        if isinstance(reply, CopyFailed):
            raise ValueError(f"rank {rank}: {reply.reason}")
        return reply

    def _by_head(self, data: np.ndarray, where: ReadKv) -> np.ndarray:
        """[layers of the group, planes, num_tokens, num_kv_heads, bytes of a head]"""
        layout = self.kv_layout
        planes, heads, dim = layout.state.row
        num_layers = len(layout.groups[where.group].layers)
        item_bytes = dim * ITEM_BYTES[layout.dtype]
        return data.reshape(num_layers, planes, where.num_tokens, heads, item_bytes)

    def _layers(self, rank: int, group: int) -> range:
        """Of the group's layers, those that the rank holds, by their place in the group."""
        layers, own = self.kv_layout.groups[group].layers, self._parts[rank].layers
        return range(bisect_left(layers, own.start), bisect_left(layers, own.stop))

    def _slices(self, rank: int, group: int) -> tuple[slice, ...]:
        layers, heads = self._layers(rank, group), self._parts[rank].kv_heads
        of_heads = slice(heads.start, heads.stop)
        return slice(layers.start, layers.stop), slice(None), slice(None), of_heads


def _ranks_with_own_heads(shape: MeshShape, parts: Sequence[RankPart]) -> list[int]:
    """Of the ranks that hold the same key-value heads, the first one sends them."""
    found: dict[tuple[int, range], int] = {}
    for rank, part in enumerate(parts):
        if part.kv_heads:
            found.setdefault((shape.place(rank)[0], part.kv_heads), rank)
    return sorted(found.values())
