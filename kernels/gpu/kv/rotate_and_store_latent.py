"""The cache write of multi-head latent attention, and the rotation of its queries, in one pass.

A program has one token: its latent, the key that its heads share, and the rotated parts of all its
queries. Memory-bound; the order of a norm's sum depends on its width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, INDICES, BadTensor, expect
from kernels.gpu.kv.fp8 import expect_scales, to_fp8
from kernels.integers import next_power_of_2

NUM_WARPS = 4


def rotate_and_store_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: Tensor,
    eps: float,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes kernels.reference.rotate_and_store_latent with Triton. Raises BadTensor."""
    _expect(query, latent, cos, sin, slot_mapping, norm)
    _expect_cache(kv_cache, latent, kv_scales)
    num_tokens, num_heads, rope_dim = query.shape
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    expect("out", out, query.shape, dtype=query.dtype, device=query.device)
    if not num_tokens:
        return out
    _rotate_and_store_latent_kernel[(num_tokens,)](
        *(query, latent, cos, sin, kv_cache, kv_scales, slot_mapping, norm, out),
        *(query.stride(0), query.stride(1), latent.stride(0), cos.stride(0), sin.stride(0)),
        *(*out.stride()[:2], eps),
        NUM_HEADS=num_heads,
        LATENT_DIM=len(norm),
        HALF=rope_dim // 2,
        BLOCK_HEADS=next_power_of_2(num_heads),
        BLOCK_LATENT=next_power_of_2(len(norm)),
        BLOCK_HALF=next_power_of_2(rope_dim // 2),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out


def _expect(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    norm: Tensor,
) -> None:
    expect("query", query, (None, None, None), dtype=FLOATS)
    (num_tokens, _, rope_dim), device = query.shape, query.device
    width = len(norm) + rope_dim
    expect("latent", latent, (num_tokens, width), dtype=query.dtype, device=device)
    expect("norm", norm, (width - rope_dim,), dtype=query.dtype, device=device)
    if rope_dim % 2:
        raise BadTensor(f"query has {rope_dim} elements to rotate, not pairs")
    for name, angles in (("cos", cos), ("sin", sin)):
        expect(name, angles, (num_tokens, rope_dim // 2), dtype=torch.float32, device=device)
    expect("slot_mapping", slot_mapping, (num_tokens,), dtype=INDICES, device=device)


def _expect_cache(kv_cache: Tensor, like: Tensor, kv_scales: Tensor | None) -> None:
    """FP8 requires scales. Raises BadTensor."""
    shape, device = (1, None, 1, None, like.shape[1]), like.device
    dtype = like.dtype if kv_scales is None else torch.float8_e4m3fn
    expect("kv_cache", kv_cache, shape, dtype=dtype, device=device, is_contiguous=True)
    if kv_scales is not None:
        expect_scales(kv_scales, 1, device)


@triton.jit
def _rotate_and_store_latent_kernel(
    query_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    kv_cache_ptr,
    kv_scales_ptr,
    slot_mapping_ptr,
    norm_ptr,
    out_ptr,
    stride_query_token,
    stride_query_head,
    stride_latent_token,
    stride_cos_token,
    stride_sin_token,
    stride_out_token,
    stride_out_head,
    eps,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    latent_row = latent_ptr + token * stride_latent_token
    cache_row = kv_cache_ptr + slot * (LATENT_DIM + 2 * HALF)
    pair = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    is_pair = pair < HALF
    cos = tl.load(cos_ptr + token * stride_cos_token + pair, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * stride_sin_token + pair, mask=is_pair, other=0.0)

    column = tl.arange(0, BLOCK_LATENT)
    is_latent = column < LATENT_DIM
    wide = tl.load(latent_row + column, mask=is_latent, other=0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT_DIM + eps)
    weight = tl.load(norm_ptr + column, mask=is_latent, other=0.0).to(tl.float32)
    normed = (scaled.to(dtype).to(tl.float32) * weight).to(dtype)  # rounded as in `rms_norm`
    is_stored = is_latent & (slot + column >= column)  # a slot of -1 skips the token
    tl.store(cache_row + column, _stored(normed, kv_scales_ptr), mask=is_stored)

    key_row = latent_row + LATENT_DIM + pair
    first = tl.load(key_row, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(key_row + HALF, mask=is_pair, other=0.0).to(tl.float32)
    key_at = cache_row + LATENT_DIM + pair
    is_stored = is_pair & (slot + pair >= pair)
    low, high = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    tl.store(key_at, _stored(low, kv_scales_ptr), mask=is_stored)
    tl.store(key_at + HALF, _stored(high, kv_scales_ptr), mask=is_stored)

    head = tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    is_read = (head < NUM_HEADS) & is_pair[None, :]  # [BLOCK_HEADS, BLOCK_HALF]
    query_row = query_ptr + token * stride_query_token + head * stride_query_head + pair[None, :]
    first = tl.load(query_row, mask=is_read, other=0.0).to(tl.float32)
    second = tl.load(query_row + HALF, mask=is_read, other=0.0).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    out_row = out_ptr + token * stride_out_token + head * stride_out_head + pair[None, :]
    tl.store(out_row, (first * cos - second * sin).to(dtype), mask=is_read)
    tl.store(out_row + HALF, (second * cos + first * sin).to(dtype), mask=is_read)


@triton.jit
def _stored(x, kv_scales_ptr):
    """Converts x to the form in the cache."""
    if kv_scales_ptr is not None:
        x = to_fp8(x.to(tl.float32) * tl.div_rn(1.0, tl.load(kv_scales_ptr)))
    return x
