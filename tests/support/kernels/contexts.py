"""Contexts in a paged cache in which reads of forbidden places are detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.kernels.inputs import random

NO_BLOCK = 2**30  # far outside every cache


@dataclass(frozen=True)
class Paged:
    cache: Tensor  # NaN where no token is stored, as in all of block 0
    tables: Tensor  # blocks in random order; invalid ids after each context
    context_lens: Tensor

    def rows(self, chosen: Sequence[int]) -> Paged:
        index = torch.tensor(chosen, dtype=torch.int64, device=self.tables.device)
        return Paged(self.cache, self.tables[index], self.context_lens[index])

    def without(self, before: Sequence[int]) -> Paged:
        """Removes blocks that only have tokens before `before`: their ids and contents."""
        cache, tables = self.cache.clone(), self.tables.clone()
        for table, end in zip(tables, before, strict=True):
            count = max(0, end) // cache.shape[3]
            cache[:, table[:count].long()] = torch.nan
            table[:count] = NO_BLOCK
        return Paged(cache, tables, self.context_lens)

    def up_to(self, context_lens: Sequence[int]) -> Paged:
        """Returns the same sequences at smaller lengths."""
        lens = torch.tensor(context_lens).to(self.context_lens)
        return Paged(self.cache, self.tables, lens)


def paged(
    context_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    index_dtype: torch.dtype = torch.int64,
) -> Paged:
    counts = [-(-length // block_size) for length in context_lens]
    shape = (2, sum(counts) + 1, num_kv_heads, block_size, head_dim)
    cache = random(*shape, like=device, dtype=torch.float32, seed=7)
    cache[:, 0] = torch.nan
    tables = torch.full((len(counts), max(counts) + 2), NO_BLOCK, dtype=index_dtype)
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(8))
    used = 0
    for seq, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        tables[seq, :count] = blocks
        if length % block_size:
            cache[:, blocks[-1], :, length % block_size :] = torch.nan
    lens = torch.tensor(context_lens, dtype=index_dtype)
    return Paged(cache.to(dtype), tables.to(device), lens.to(device))
