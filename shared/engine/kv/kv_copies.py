"""Copies of KV between a paged cache and the wire layout, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.ops import gather_blocks, scatter_blocks
from shared.engine.kv.kv_cache import release_blocks
from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, KvShard


def any_thread() -> None:
    """Accepts any thread, as computing on the CPU does."""


class KvCopies:
    """Copies KV to and from the cache `kv_cache` [num_slots, planes, num_blocks, heads, block_size,
    dim]. A `shard` is a part of one group's layers and heads in this cache; None: all of them.

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
    def read_kv(self, run: KvRun, out: memoryview) -> None:
        """Copies KV out of the cache. Raises ValueError for tokens outside of the table, or an
        `out` of another size.
        """
        if run.num_tokens == 0:
            return
        shard = self._shard_of(run)
        self._check_run(run, shard, out.nbytes)
        self._check_thread()
        table = torch.tensor(run.block_table, device=self._device)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        wire = torch.frombuffer(out, dtype=torch.uint8).view(self.kv_cache.dtype)
        wire = wire.view(self._wire_shape(run.num_tokens, shard))
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, run, shard)
            wire.copy_(cache[rows].permute(1, 2, 0, 3, 4))
        elif self._device.type == "cpu":
            gather_blocks(cache, table, run.first_token, run.num_tokens, wire)
        else:
            staged = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            gather_blocks(cache, table, run.first_token, run.num_tokens, staged)
            wire.copy_(staged)

    @torch.inference_mode()
    def write_kv(self, run: KvRun, payload: memoryview) -> None:
        """The reverse of `read_kv`."""
        if run.num_tokens == 0:
            return
        shard = self._shard_of(run)
        self._check_run(run, shard, payload.nbytes)
        self._check_thread()
        wire = torch.empty(self._wire_shape(run.num_tokens, shard), dtype=self.kv_cache.dtype)
        # A copy, because torch does not support read-only memory.
        np.copyto(wire.view(-1).view(torch.uint8).numpy(), np.frombuffer(payload, dtype=np.uint8))
        wire = wire.to(self._device)
        table = torch.tensor(run.block_table, device=self._device)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, run, shard)
            if cache.element_size() == 1:  # torch cannot copy FP8 by index
                cache, wire = cache.view(torch.uint8), wire.view(torch.uint8)
            cache[rows] = wire.permute(2, 0, 1, 3, 4)
        else:
            scatter_blocks(cache, table, run.first_token, run.num_tokens, wire)

    @torch.inference_mode()
    def zero_blocks(self, block_ids: list[int]) -> None:
        self._check_thread()
        # bytes: torch has no such operations for FP8
        as_bytes = self.kv_cache.view(torch.uint8)
        as_bytes.index_fill_(2, torch.tensor(block_ids, device=self._device), 0)

    def give_back(self, block_ids: list[int]) -> None:
        release_blocks(self.kv_cache, block_ids)

    def _rows(self, table: Tensor, run: KvRun, shard: KvShard) -> tuple[Tensor | slice, ...]:
        """Returns the index of some heads of these tokens: [num_tokens, layers, planes,
        heads, dim]. The kernels copy all heads of a cache; some of them leave only for a
        worker cut differently.
        """
        size = self.kv_layout.block_size
        positions = torch.arange(run.num_tokens, device=self._device) + run.first_token
        heads = slice(shard.first_head, shard.heads.stop)
        return slice(None), slice(None), table[positions // size], heads, positions % size

    def _shard_of(self, run: KvRun) -> KvShard:
        num_layers = len(self.kv_layout.groups[run.group].layers)
        whole = KvShard(0, num_layers, 0, self.kv_layout.state.row[1])
        if run.shard is not None and run.shard.crossing(whole) != run.shard:
            raise ValueError(f"{run.shard} is not within {whole}")
        return whole if run.shard is None else run.shard

    def _wire_shape(self, num_tokens: int, shard: KvShard) -> tuple[int, ...]:
        planes, _, dim = self.kv_layout.state.row
        return (shard.num_layers, planes, num_tokens, shard.num_heads, dim)

    def _check_run(self, run: KvRun, shard: KvShard, num_bytes: int) -> None:
        end, num_blocks = run.first_token + run.num_tokens, len(run.block_table)
        if run.first_token < 0 or end > num_blocks * self.kv_layout.block_size:
            raise ValueError(
                f"tokens [{run.first_token}, {end}) lie outside of "
                f"{num_blocks} blocks of {self.kv_layout.block_size}"
            )
        if num_bytes != run.num_tokens * shard.num_cells * self.kv_layout.cell_bytes:
            raise ValueError(
                f"{num_bytes} bytes are not {run.num_tokens} tokens of {self.kv_layout.key}"
            )
