"""What cuDNN is given to attend over the paged cache.

    queries, result   [T, heads, D], packed: a sequence's rows begin at its ragged offset
    keys, values      [blocks, kv_heads, block, D] each, found by a page table [B, W] a sequence
    lengths           [B] int32 of new tokens, and of the context with them; 0 skips a sequence
    mask              causal from the bottom right: the last new token sees the whole context

A graph is built for a shape and serves every step up to it, so shapes are few: numbers of
sequences, tokens and blocks are powers of two. All arrays are made on the device, from those that a
step has there: nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from shared.engine.layers.attention_inputs import PrefillRows

LEAST_TOKENS, LEAST_BLOCKS = 64, 16


class PrefillShape(NamedTuple):
    """`num_tokens` is a limit of a sequence's new tokens, `num_blocks` that of its context;
    `cache_blocks` are those of the whole cache.
    """

    num_seqs: int
    num_tokens: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cache_blocks: int

    @classmethod
    def of(cls, query: Tensor, kv_cache: Tensor, rows: PrefillRows) -> Self:
        num_seqs, num_blocks = rows.block_tables.shape
        cache_blocks, num_kv_heads, block_size, head_dim = kv_cache.shape[1:]
        return cls(
            _power_of_two(num_seqs),
            max(LEAST_TOKENS, _power_of_two(len(query))),
            max(LEAST_BLOCKS, _power_of_two(num_blocks)),
            query.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            cache_blocks,
        )


class PrefillArrays(NamedTuple):
    """int32"""

    query_lens: Tensor  # [B, 1, 1, 1]
    context_lens: Tensor  # [B, 1, 1, 1]
    offsets: Tensor  # [B + 1, 1, 1, 1] elements before a sequence's first row
    page_table: Tensor  # [B, 1, W, 1]


def prefill_arrays(rows: PrefillRows, shape: PrefillShape) -> PrefillArrays:
    num_seqs, num_blocks = rows.block_tables.shape
    missing = shape.num_seqs - num_seqs
    starts = rows.cu_seqlens_q
    offsets = torch.cat((starts, starts[-1:].expand(missing))) * (shape.num_heads * shape.head_dim)
    table = pad(rows.block_tables, (0, shape.num_blocks - num_blocks, 0, missing))
    return PrefillArrays(
        _column(pad(starts.diff(), (0, missing))),
        _column(pad(rows.context_lens, (0, missing))),
        _column(offsets),
        table.to(torch.int32)[:, None, :, None],
    )


def _column(values: Tensor) -> Tensor:
    return values.to(torch.int32)[:, None, None, None]


def _power_of_two(size: int) -> int:
    """Returns the least one that is not below `size`."""
    return 1 << (size - 1).bit_length()
