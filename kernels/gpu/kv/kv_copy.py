"""Copies runs of tokens between the paged cache and the wire: addresses.

Both sides consist of rows, the elements of one head of one token, moved as 64-bit words if their
size is a multiple of 64 bits. Programs process rows in the order of the cache: one side of a tile
is a contiguous part of a block, the other consists of a few heads each of adjacent tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import INDICES, BadTensor, expect
from kernels.integers import cdiv, next_power_of_2

TILE_WORDS = 2048  # words of 8 bytes: 8 per thread, four loads of 16 bytes
NUM_WARPS = 8


def move(
    kernel: Any,
    kv_cache: Tensor,
    block_table: Tensor,
    first_token: int,
    num_tokens: int,
    wire: Tensor,
) -> None:
    """Launches `kernel` for a run. Raises BadTensor."""
    _expect(kv_cache, block_table, first_token, num_tokens, wire)
    if not wire.numel():
        return
    num_layers, num_planes, _, num_kv_heads, block_size, _ = kv_cache.shape
    cache_words, wire_words = as_words(kv_cache), as_words(wire)
    row_words = cache_words.shape[-1]
    block_words = next_power_of_2(row_words)
    block_rows = max(1, TILE_WORDS // block_words)
    first_block, end_block = (
        first_token // block_size,
        _num_blocks(first_token, num_tokens, kv_cache),
    )
    num_rows = (end_block - first_block) * num_kv_heads * block_size
    kernel[(cdiv(num_rows, block_rows), num_layers * num_planes)](
        *(cache_words, block_table, wire_words),
        *(cache_words.stride(1), first_token, num_tokens, num_rows),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        ROW_WORDS=row_words,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def as_words(tensor: Tensor) -> Tensor:
    """Returns the same bytes, in the widest words that divide the last dimension."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    for word in (torch.int64, torch.int32):
        if row_bytes % word.itemsize == 0:
            return tensor.view(word)
    return tensor.view(torch.uint8)


def _expect(
    kv_cache: Tensor, block_table: Tensor, first_token: int, num_tokens: int, wire: Tensor
) -> None:
    expect("kv_cache", kv_cache, (None,) * 6, is_contiguous=True)
    num_layers, num_planes, _, num_kv_heads, _, head_dim = kv_cache.shape
    expect("block_table", block_table, (None,), dtype=INDICES, device=kv_cache.device)
    expect(
        "payload",
        wire,
        (num_layers, num_planes, num_tokens, num_kv_heads, head_dim),
        dtype=kv_cache.dtype,
        device=kv_cache.device,
        is_contiguous=True,
    )
    num_needed = _num_blocks(first_token, num_tokens, kv_cache)
    if first_token < 0 or num_needed > len(block_table):
        raise BadTensor(
            f"tokens [{first_token}, {first_token + num_tokens}) are outside the "
            f"{len(block_table)} blocks of block_table"
        )


def _num_blocks(first_token: int, num_tokens: int, kv_cache: Tensor) -> int:
    """Returns the blocks that a sequence has up to the end of the run."""
    return cdiv(first_token + num_tokens, kv_cache.shape[4])


@triton.jit
def places(
    block_table_ptr,
    stride_cache_plane,
    first_token,
    num_tokens,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Returns the first words of this program's rows in the cache and in the payload, and a mask of
    existing rows: [BLOCK_ROWS, 1] each.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    plane = tl.program_id(1).to(tl.int64)  # plane among those of all layers, one after the other
    block_index = first_token // BLOCK_SIZE + row // (NUM_KV_HEADS * BLOCK_SIZE)
    token = block_index * BLOCK_SIZE + row % BLOCK_SIZE - first_token
    is_moved = (row < num_rows) & (token >= 0) & (token < num_tokens)
    block_id = tl.load(block_table_ptr + block_index, mask=is_moved, other=0).to(tl.int64)
    in_block = row % (NUM_KV_HEADS * BLOCK_SIZE)
    cached = plane * stride_cache_plane
    cached += (block_id * (NUM_KV_HEADS * BLOCK_SIZE) + in_block) * ROW_WORDS
    sent = (plane * num_tokens + token) * NUM_KV_HEADS + in_block // BLOCK_SIZE
    return cached, sent * ROW_WORDS, is_moved
