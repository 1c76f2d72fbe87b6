"""Copies a run of tokens from the paged cache to the wire layout, in all layers at once.

    out[layer, kv, t, head] =
        kv_cache[layer, kv, block_table[p // block_size], head, p % block_size]

with p = first_token + t. Memory-bound: a byte is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.kv.kv_copy import move, places


def gather_blocks(
    kv_cache: Tensor,
    block_table: Tensor,
    first_token: int,
    num_tokens: int,
    out: Tensor,
) -> None:
    """Computes kernels.torch_ops.gather_blocks with Triton. Raises BadTensor."""
    move(_gather_blocks_kernel, kv_cache, block_table, first_token, num_tokens, out)


@triton.jit(do_not_specialize=["first_token", "num_tokens", "num_rows"])
def _gather_blocks_kernel(
    kv_cache_ptr,
    block_table_ptr,
    out_ptr,
    stride_cache_plane: tl.int64,
    first_token,
    num_tokens,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    cached, sent, is_moved = places(
        *(block_table_ptr, stride_cache_plane, first_token, num_tokens, num_rows),
        *(NUM_KV_HEADS, BLOCK_SIZE, ROW_WORDS, BLOCK_ROWS),
    )
    word = tl.arange(0, BLOCK_WORDS)[None, :]  # [1, BLOCK_WORDS]
    is_moved = is_moved & (word < ROW_WORDS)  # [BLOCK_ROWS, BLOCK_WORDS]
    words = tl.load(kv_cache_ptr + cached + word, mask=is_moved)  # [BLOCK_ROWS, BLOCK_WORDS]
    tl.store(out_ptr + sent + word, words, mask=is_moved)
