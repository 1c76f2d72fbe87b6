"""Norm (if heads have one) and rotation of queries and keys, and the cache write of keys and
values, in one pass over the output of the fused projection.

Memory-bound: a head of a token is a row that is read once and written once, to the queries or to
the cache. Queries, keys and values are adjacent, so programs process rows of all three kinds: loads
have no gaps, for any numbers of heads.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, INDICES, BadTensor, expect
from kernels.gpu.kv.fp8 import expect_scales, scaled
from kernels.integers import cdiv, next_power_of_2

BLOCK_ELEMENTS = 2048  # a program's part: 16 per thread, two loads of 16 bytes
NUM_WARPS = 4


def rotate_and_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    has_unit_offset: bool = False,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Computes kernels.reference.rotate_and_store with Triton. Raises BadTensor."""
    _expect(heads, cos, sin, kv_cache, slot_mapping, kv_scales)
    _expect_norms(query_norm, key_norm, heads)
    num_tokens, num_all_heads, head_dim = heads.shape
    num_kv_heads = kv_cache.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    query = heads.new_empty((num_tokens, num_heads, head_dim))
    if not heads.numel():
        return query
    half, unit = cos.shape[1], _angle_unit(cos, sin)
    blocks = _row_blocks(head_dim, half)
    num_rows = num_tokens * num_all_heads
    _rotate_and_store_kernel[(cdiv(num_rows, blocks[0]),)](
        *(heads, cos, sin, query_norm, key_norm, kv_cache, kv_scales, slot_mapping, query),
        *heads.stride()[:2],
        *(cos.stride(0) // unit, sin.stride(0) // unit, kv_cache.stride(0), num_rows, eps),
        *(num_heads, num_kv_heads, kv_cache.shape[3], head_dim, half, unit),
        *(query_norm is not None, has_unit_offset, kv_scales is not None, *blocks),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return query


def _expect(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:
    expect("heads", heads, (None, None, None), dtype=FLOATS)
    _expect_angles(cos, sin, heads)
    num_kv_heads = kv_cache.shape[2] if kv_cache.ndim == 5 else 1
    _expect_cache(kv_cache, heads, num_kv_heads, kv_scales)
    expect("slot_mapping", slot_mapping, heads.shape[:1], dtype=INDICES, device=heads.device)
    if heads.shape[1] <= 2 * num_kv_heads:
        raise BadTensor(f"heads has {heads.shape[1]} heads: no query with {num_kv_heads} KV heads")


def _expect_norms(query_norm: Tensor | None, key_norm: Tensor | None, heads: Tensor) -> None:
    if (query_norm is None) != (key_norm is None):
        raise BadTensor("one of query_norm and key_norm is missing")
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            expect(name, norm, heads.shape[2:], dtype=heads.dtype, device=heads.device)


def _expect_angles(cos: Tensor, sin: Tensor, x: Tensor) -> None:
    """Checks cos and sin. Raises BadTensor."""
    expect("cos", cos, (x.shape[0], None), dtype=torch.float32, device=x.device)
    expect("sin", sin, cos.shape, dtype=torch.float32, device=x.device)
    if not 0 < 2 * cos.shape[1] <= x.shape[2]:
        raise BadTensor(f"cos has {cos.shape[1]} columns for heads of {x.shape[2]} elements")


def _expect_cache(
    kv_cache: Tensor, like: Tensor, num_kv_heads: int, kv_scales: Tensor | None
) -> None:
    """Checks one layer's cache for heads `like`; FP8 requires scales. Raises BadTensor."""
    dtype = like.dtype if kv_scales is None else torch.float8_e4m3fn
    shape = (2, None, num_kv_heads, None, like.shape[2])
    expect("kv_cache", kv_cache, shape, dtype=dtype, device=like.device, is_contiguous=True)
    if kv_scales is not None:
        expect_scales(kv_scales, num_kv_heads, like.device)


def _angle_unit(cos: Tensor, sin: Tensor) -> int:
    """Strides are passed in units of 16 bytes if they are multiples: the compiler detects whether a
    number is a multiple of 16, not of 4, and would otherwise load each angle separately.
    """
    return 4 if cos.stride(0) % 4 == sin.stride(0) % 4 == 0 else 1


@cache
def _row_blocks(head_dim: int, half: int) -> tuple[int, int, int]:
    """BLOCK_ROWS, BLOCK_HALF, BLOCK_REST: heads are rows of three parts, both halves of the rotary
    part, and the rest.
    """
    block_half = next_power_of_2(half)
    block_rest = next_power_of_2(max(1, head_dim - 2 * half))
    block_rows = max(1, BLOCK_ELEMENTS // max(2 * block_half, block_rest))
    return block_rows, block_half, block_rest


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_and_store_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    kv_cache_ptr,
    kv_scales_ptr,
    slot_mapping_ptr,
    query_ptr,
    stride_heads_token,
    stride_heads_head,
    stride_cos_token,
    stride_sin_token,
    stride_cache_plane: tl.int64,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_UNIT_OFFSET: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    NUM_ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    HAS_REST: tl.constexpr = HEAD_DIM > 2 * HALF
    dtype = query_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    token = (row // NUM_ALL_HEADS).to(tl.int64)
    head = row % NUM_ALL_HEADS
    is_row = row < num_rows
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    heads_row = heads_ptr + token * stride_heads_token + head * stride_heads_head

    pair = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    is_pair = is_row & (pair < HALF)  # [BLOCK_ROWS, BLOCK_HALF]
    first_value = tl.load(heads_row + pair, mask=is_pair, other=0.0)  # [BLOCK_ROWS, BLOCK_HALF]
    second_value = tl.load(heads_row + HALF + pair, mask=is_pair, other=0.0)
    is_turned = is_pair & (is_value == 0)
    cos_row = cos_ptr + token * stride_cos_token * ANGLE_UNIT
    sin_row = sin_ptr + token * stride_sin_token * ANGLE_UNIT
    cos = tl.load(cos_row + pair, mask=is_turned, other=0.0)  # [BLOCK_ROWS, BLOCK_HALF]
    sin = tl.load(sin_row + pair, mask=is_turned, other=0.0)
    first, second = first_value.to(tl.float32), second_value.to(tl.float32)
    if HAS_REST:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        is_rest = is_row & (column < HEAD_DIM)  # [BLOCK_ROWS, BLOCK_REST]
        rest_value = tl.load(heads_row + column, mask=is_rest, other=0.0)
        rest = rest_value.to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(first * first, axis=1, keep_dims=True)  # [BLOCK_ROWS, 1]
        squares += tl.sum(second * second, axis=1, keep_dims=True)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        weight = _weight(query_norm_ptr, key_norm_ptr, pair, is_turned, is_query)
        first = _normed(first, scale, weight, dtype, HAS_UNIT_OFFSET)
        weight = _weight(query_norm_ptr, key_norm_ptr, HALF + pair, is_turned, is_query)
        second = _normed(second, scale, weight, dtype, HAS_UNIT_OFFSET)
        if HAS_REST:
            is_weighed = is_rest & (is_value == 0)
            weight = _weight(query_norm_ptr, key_norm_ptr, column, is_weighed, is_query)
            rest = _normed(rest, scale, weight, dtype, HAS_UNIT_OFFSET)

    first, second = _rotated(first, second, cos, sin)
    first = tl.where(is_value, first_value, first.to(dtype))
    second = tl.where(is_value, second_value, second.to(dtype))
    query_row = query_ptr + (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(query_row + pair, first, mask=is_pair & is_query)
    tl.store(query_row + HALF + pair, second, mask=is_pair & is_query)
    if HAS_REST:
        rest = tl.where(is_value, rest_value, rest.to(dtype))
        tl.store(query_row + column, rest, mask=is_rest & is_query)

    slot = tl.load(slot_mapping_ptr + token, mask=is_row, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (is_query == 0)  # [BLOCK_ROWS, 1]
    plane = ((head - NUM_HEADS) // NUM_KV_HEADS).to(tl.int64)  # 0 for keys, 1 for values
    place = _cache_row(slot, (head - NUM_HEADS) % NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE)
    cache_ptrs = kv_cache_ptr + plane * stride_cache_plane + place * HEAD_DIM
    if HAS_SCALES:
        scale_ptrs = kv_scales_ptr + (head - NUM_HEADS)
        first = scaled(first, scale_ptrs, is_stored)
        second = scaled(second, scale_ptrs, is_stored)
        if HAS_REST:
            rest = scaled(rest, scale_ptrs, is_stored)
    tl.store(cache_ptrs + pair, first, mask=is_pair & is_stored)
    tl.store(cache_ptrs + HALF + pair, second, mask=is_pair & is_stored)
    if HAS_REST:
        tl.store(cache_ptrs + column, rest, mask=is_rest & is_stored)


@triton.jit
def _weight(query_norm_ptr, key_norm_ptr, column, is_weighed, is_query):
    """The norm weights of these columns, for queries or keys. [BLOCK_ROWS, columns] FP32"""
    of_query = tl.load(query_norm_ptr + column, mask=is_weighed & is_query, other=0.0)
    of_key = tl.load(key_norm_ptr + column, mask=is_weighed & (is_query == 0), other=0.0)
    return tl.where(is_query, of_query, of_key).to(tl.float32)


@triton.jit
def _normed(x, scale, weight, dtype: tl.constexpr, HAS_UNIT_OFFSET: tl.constexpr):
    """x [R, D], scale [R, 1], weight [R, D], FP32; rounded at the same steps as `rms_norm`."""
    if HAS_UNIT_OFFSET:
        out = x * scale * (weight + 1.0)
    else:
        out = (x * scale).to(dtype).to(tl.float32) * weight
    return out.to(dtype).to(tl.float32)


@triton.jit
def _rotated(first, second, cos, sin):
    """Rotates; all arguments are FP32, of one shape."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _cache_row(slot, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The row of one token and head in a plane [num_blocks, num_kv_heads, block_size]."""
    return (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
