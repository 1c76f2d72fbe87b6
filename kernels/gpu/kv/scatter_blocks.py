"""Copies a run of tokens from the wire layout to the paged cache, in all layers at once.

    kv_cache[layer, kv, block_table[p // block_size], head, p % block_size] =
        payload[layer, kv, t, head]

with p = first_token + t. Memory-bound: a byte is read once and written once. Changes no token
outside the run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.kv.kv_copy import move, places


def scatter_blocks(
    kv_cache: Tensor,
    block_table: Tensor,
    first_token: int,
    num_tokens: int,
    payload: Tensor,
) -> None:
    """Computes kernels.torch_ops.scatter_blocks with Triton. Raises BadTensor."""
    move(_scatter_blocks_kernel, kv_cache, block_table, first_token, num_tokens, payload)


@triton.jit(do_not_specialize=["first_token", "num_tokens", "num_rows"])
def _scatter_blocks_kernel(
    kv_cache_ptr,
    block_table_ptr,
    payload_ptr,
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
    words = tl.load(payload_ptr + sent + word, mask=is_moved)  # [BLOCK_ROWS, BLOCK_WORDS]
    tl.store(kv_cache_ptr + cached + word, words, mask=is_moved)
