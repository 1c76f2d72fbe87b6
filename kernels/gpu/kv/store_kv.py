"""Writes the new tokens' keys and values into their slots of one layer's paged cache.

    kv_cache[0, slot // block_size, head, slot % block_size] = key[token, head]; [1, ...] = value

Memory-bound: a head of a token is a row that is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, INDICES, BadTensor, expect
from kernels.gpu.kv.fp8 import to_fp8

BLOCK_ELEMENTS = 1024  # of keys, and as many of values: 16 a thread, two loads of 16 bytes
NUM_WARPS = 4


def store_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """As kernels.reference.store_kv. Raises BadTensor."""
    num_tokens, num_kv_heads, head_dim = (*key.shape, 0, 0)[:3]
    expect("key", key, (None, None, None), dtype=FLOATS)
    expect("value", value, key.shape, dtype=key.dtype, device=key.device)
    expect_cache(kv_cache, key, num_kv_heads, kv_scales)
    expect("slot_mapping", slot_mapping, (num_tokens,), dtype=INDICES, device=key.device)
    if not key.numel():
        return
    block_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    _store_kv_kernel[(triton.cdiv(num_tokens * num_kv_heads, block_rows),)](
        *(key, value, kv_cache, slot_mapping, kv_scales),
        *(*key.stride()[:2], *value.stride()[:2], kv_cache.stride(0)),
        num_tokens * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_DIM=head_dim,
        HAS_SCALES=kv_scales is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        num_warps=NUM_WARPS,
    )


def expect_cache(
    kv_cache: Tensor, like: Tensor, num_kv_heads: int, kv_scales: Tensor | None
) -> None:
    """One layer's cache for heads `like` these; in FP8 with scales, else without. BadTensor."""
    dtype = like.dtype if kv_scales is None else torch.float8_e4m3fn
    shape = (2, None, num_kv_heads, None, like.shape[2])
    expect("kv_cache", kv_cache, shape, dtype=dtype, device=like.device, is_contiguous=True)
    if kv_scales is None:
        return
    if like.is_cuda and torch.cuda.get_device_capability(like.device) < (8, 9):
        raise BadTensor("kv_cache is in FP8, which takes compute capability 8.9 or more")
    expect(
        "kv_scales",
        kv_scales,
        (2, num_kv_heads),
        dtype=torch.float32,
        device=like.device,
        is_contiguous=True,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    kv_scales_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_plane,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)[None, :]  # [1, BLOCK_DIM]
    is_stored = (slot >= 0) & (column < HEAD_DIM)  # [BLOCK_ROWS, BLOCK_DIM]
    key_ptrs = key_ptr + token * stride_key_token + head * stride_key_head + column
    value_ptrs = value_ptr + token * stride_value_token + head * stride_value_head + column
    key = tl.load(key_ptrs, mask=is_stored)  # [BLOCK_ROWS, BLOCK_DIM]
    value = tl.load(value_ptrs, mask=is_stored)  # [BLOCK_ROWS, BLOCK_DIM]
    if HAS_SCALES:
        key = scaled(key, kv_scales_ptr + head, slot >= 0)
        value = scaled(value, kv_scales_ptr + NUM_KV_HEADS + head, slot >= 0)
    place = cache_row(slot, head, NUM_KV_HEADS, BLOCK_SIZE) * HEAD_DIM + column
    tl.store(kv_cache_ptr + place, key, mask=is_stored)
    tl.store(kv_cache_ptr + stride_cache_plane + place, value, mask=is_stored)


@triton.jit
def scaled(x, scale_ptrs, mask):
    """x [R, D] as FP8, by a scale for each row. scale_ptrs, mask [R, 1]"""
    inverse = tl.div_rn(1.0, tl.load(scale_ptrs, mask=mask, other=1.0))  # [R, 1]
    return to_fp8(x.to(tl.float32) * inverse)


@triton.jit
def cache_row(slot, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The row of one token and head in a plane [num_blocks, num_kv_heads, block_size]."""
    return (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
