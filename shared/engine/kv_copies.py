"""Copies of KV between a paged cache and the wire layout, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import gather_blocks, scatter_blocks
from shared.kv_layout import KvLayout, KvShard


def any_thread() -> None:
    """On the CPU any thread may compute."""


class KvCopies:
    """`kv_cache` [num_slots, planes, num_blocks, heads, block_size, dim]. A `shard` is a part of
    one group's layers and heads in this cache; None: all of them.

    `check_thread` raises if the calling thread would launch on another device; it runs before each
    operation on the device.
    """

    def __init__(
        self, kv_cache: Tensor, kv_layout: KvLayout, check_thread: Callable[[], None] = any_thread
    ) -> None:
        self.kv_cache = kv_cache
        self.kv_layout = kv_layout
        self._device = kv_cache.device
        self._check_thread = check_thread

    @torch.inference_mode()
    def read_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        out: memoryview,
        group: int = 0,
        shard: KvShard | None = None,
    ) -> None:
        """Raises ValueError for tokens outside of the table, or an `out` of another size."""
        if num_tokens == 0:
            return
        shard = self._shard_of(group, shard)
        self._check_run(block_table, first_token, num_tokens, shard, out.nbytes)
        self._check_thread()
        table = torch.tensor(block_table, device=self._device)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        wire = torch.frombuffer(out, dtype=torch.uint8).view(self.kv_cache.dtype)
        wire = wire.view(self._wire_shape(num_tokens, shard))
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, first_token, num_tokens, shard)
            wire.copy_(cache[rows].permute(1, 2, 0, 3, 4))
        elif self._device.type == "cpu":
            gather_blocks(cache, table, first_token, num_tokens, wire)
        else:
            staged = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            gather_blocks(cache, table, first_token, num_tokens, staged)
            wire.copy_(staged)

    @torch.inference_mode()
    def write_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        group: int = 0,
        shard: KvShard | None = None,
    ) -> None:
        """The reverse of `read_kv`."""
        if num_tokens == 0:
            return
        shard = self._shard_of(group, shard)
        self._check_run(block_table, first_token, num_tokens, shard, payload.nbytes)
        self._check_thread()
        wire = torch.empty(self._wire_shape(num_tokens, shard), dtype=self.kv_cache.dtype)
        # A copy, because torch does not support read-only memory.
        np.copyto(wire.view(-1).view(torch.uint8).numpy(), np.frombuffer(payload, dtype=np.uint8))
        wire = wire.to(self._device)
        table = torch.tensor(block_table, device=self._device)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, first_token, num_tokens, shard)
            if cache.element_size() == 1:  # torch cannot copy FP8 by index
                cache, wire = cache.view(torch.uint8), wire.view(torch.uint8)
            cache[rows] = wire.permute(2, 0, 1, 3, 4)
        else:
            scatter_blocks(cache, table, first_token, num_tokens, wire)

    @torch.inference_mode()
    def zero_blocks(self, block_ids: list[int]) -> None:
        self._check_thread()
        self.kv_cache.index_fill_(2, torch.tensor(block_ids, device=self._device), 0)

    def _rows(
        self, table: Tensor, first_token: int, num_tokens: int, shard: KvShard
    ) -> tuple[Tensor | slice, ...]:
        """Index of some heads of these tokens: [num_tokens, layers, planes, heads, dim]. The
        kernels copy all heads of a cache; some of them leave only for a worker cut differently.
        """
        size = self.kv_layout.block_size
        positions = torch.arange(first_token, first_token + num_tokens, device=self._device)
        heads = slice(shard.first_head, shard.heads.stop)
        return slice(None), slice(None), table[positions // size], heads, positions % size

    def _shard_of(self, group: int, shard: KvShard | None) -> KvShard:
        whole = KvShard(0, len(self.kv_layout.groups[group].layers), 0, self.kv_layout.state.row[1])
        if shard is not None and shard.crossing(whole) != shard:
            raise ValueError(f"{shard} is not within {whole}")
        return whole if shard is None else shard

    def _wire_shape(self, num_tokens: int, shard: KvShard) -> tuple[int, ...]:
        planes, _, dim = self.kv_layout.state.row
        return (shard.num_layers, planes, num_tokens, shard.num_heads, dim)

    def _check_run(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        shard: KvShard,
        num_bytes: int,
    ) -> None:
        if (
            first_token < 0
            or first_token + num_tokens > len(block_table) * self.kv_layout.block_size
        ):
            raise ValueError(
                f"tokens [{first_token}, {first_token + num_tokens}) lie outside of "
                f"{len(block_table)} blocks of {self.kv_layout.block_size}"
            )
        if num_bytes != num_tokens * shard.num_cells * self.kv_layout.cell_bytes:
            raise ValueError(
                f"{num_bytes} bytes are not {num_tokens} tokens of {self.kv_layout.key}"
            )
