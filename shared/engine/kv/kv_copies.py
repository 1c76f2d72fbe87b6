"""Copies of KV between a paged cache and the wire layout, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.device import to_device
from kernels.ops import gather_blocks, scatter_blocks
from shared.engine.kv.host_copies import HostCopies
from shared.engine.kv.kv_cache import release_blocks
from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, KvShard


def any_thread() -> None:
    """Accepts any thread, as computing on the CPU does."""


class KvCopies:
    """Copies KV to and from the cache `kv_cache` [num_slots, planes, num_blocks, heads, block_size,
    dim]. A `shard` is a part of one group's layers and heads in this cache; None: all of them.

    `check_thread` raises if the calling thread would launch on another device; it runs before each
    operation on the device. `host_copies` pass between the device and the host; None: the default
    of the device, which for the CPU is no copy.
    """

    def __init__(
        self,
        kv_cache: Tensor,
        kv_layout: KvLayout,
        check_thread: Callable[[], None] = any_thread,
        host_copies: HostCopies | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.kv_layout = kv_layout
        self._device = kv_cache.device
        self._check_thread = check_thread
        if host_copies is None and self._device.type != "cpu":
            host_copies = HostCopies()
        self._host_copies = host_copies

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
        shape = self._wire_shape(run.num_tokens, shard)
        if self._host_copies is None:
            wire = torch.frombuffer(out, dtype=torch.uint8).view(self.kv_cache.dtype).view(shape)
            self._gather(run, shard, wire)
        else:
            wire = torch.empty(shape, dtype=self.kv_cache.dtype, device=self._device)
            self._gather(run, shard, wire)
            self._host_copies.to_host(wire, out)

    @torch.inference_mode()
    def write_kv(self, run: KvRun, payload: memoryview) -> None:
        """The reverse of `read_kv`."""
        if run.num_tokens == 0:
            return
        shard = self._shard_of(run)
        self._check_run(run, shard, payload.nbytes)
        self._check_thread()
        shape = self._wire_shape(run.num_tokens, shard)
        wire = torch.empty(shape, dtype=self.kv_cache.dtype, device=self._device)
        if self._host_copies is None:
            # A copy, because torch does not support read-only memory.
            as_bytes = wire.view(-1).view(torch.uint8).numpy()
            np.copyto(as_bytes, np.frombuffer(payload, dtype=np.uint8))
        else:
            self._host_copies.to_device(payload, wire)
        self._scatter(run, shard, wire)

    def _gather(self, run: KvRun, shard: KvShard, wire: Tensor) -> None:
        table, first_token = self._table(run)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, first_token, run.num_tokens, shard)
            wire.copy_(cache[rows].permute(1, 2, 0, 3, 4))
        else:
            gather_blocks(cache, table, first_token, run.num_tokens, wire)

    def _scatter(self, run: KvRun, shard: KvShard, wire: Tensor) -> None:
        table, first_token = self._table(run)
        cache = self.kv_cache[shard.first_layer : shard.layers.stop]
        if shard.num_heads < cache.shape[3]:
            rows = self._rows(table, first_token, run.num_tokens, shard)
            if cache.element_size() == 1:  # torch cannot copy FP8 by index
                cache, wire = cache.view(torch.uint8), wire.view(torch.uint8)
            cache[rows] = wire.permute(2, 0, 1, 3, 4)
        else:
            scatter_blocks(cache, table, first_token, run.num_tokens, wire)

    @torch.inference_mode()
    def zero_blocks(self, block_ids: list[int]) -> None:
        self._check_thread()
        # bytes: torch has no such operations for FP8
        as_bytes = self.kv_cache.view(torch.uint8)
        as_bytes.index_fill_(2, to_device(np.array(block_ids), self._device), 0)

    def give_back(self, block_ids: list[int]) -> None:
        release_blocks(self.kv_cache, block_ids)

    def _table(self, run: KvRun) -> tuple[Tensor, int]:
        """Returns the blocks that hold the run, and the position of its first token in them."""
        size = self.kv_layout.block_size
        first, offset = divmod(run.first_token, size)
        blocks = run.block_table[first : -(-(run.first_token + run.num_tokens) // size)]
        if self._host_copies is None:
            return torch.tensor(blocks), offset
        return self._host_copies.indices(blocks, self._device), offset

    def _rows(
        self, table: Tensor, first_token: int, num_tokens: int, shard: KvShard
    ) -> tuple[Tensor | slice, ...]:
        """Returns the index of some heads of these tokens: [num_tokens, layers, planes,
        heads, dim]. The kernels copy all heads of a cache; some of them leave only for a
        worker cut differently.
        """
        size = self.kv_layout.block_size
        positions = torch.arange(num_tokens, device=self._device) + first_token
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
