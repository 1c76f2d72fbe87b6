"""Operations on the KV cache. Moved blocks have the bits of the reference."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.gpu.kv import copy_blocks as copying
from kernels.gpu.kv import gather_blocks as gathering
from kernels.gpu.kv import rotate_and_store as storing
from kernels.gpu.kv import rotate_and_store_latent as storing_latents
from kernels.gpu.kv import scatter_blocks as scattering
from kernels.reference.rotate_and_store import rotate_and_store as reference_store
from kernels.reference.rotate_and_store_latent import (
    rotate_and_store_latent as reference_store_latent,
)
from kernels.reference.store_kv import store_kv
from kernels.torch_ops.copy_blocks import copy_blocks as reference_copy
from kernels.torch_ops.gather_blocks import gather_blocks as reference_gather
from kernels.torch_ops.scatter_blocks import scatter_blocks as reference_scatter
from tests.support.kernels.cases.case import Inputs, Result, Results, cases
from tests.support.kernels.paged import empty_cache, slots_of
from tests.support.kernels.tolerance import assert_equal, assert_near, assert_same_bits

FP8 = torch.float8_e4m3fn
NUM_LAYERS = 2
FIRST_TOKEN = 5  # within a block
EPS = 1e-6
WRITTEN = partial(assert_near, has_nan=True)  # every other place stays NaN


def rotate_and_store(inputs: Inputs, rows: str, has_norms: bool) -> Results:
    heads, angles, slots, norms = _new_tokens(inputs, rows)
    norms = norms if has_norms else {}
    cache = _cache_for(inputs, heads)
    expected = cache.clone() if has_norms else cache.float()
    query = storing.rotate_and_store(heads, *angles, cache, slots, **norms)
    given = heads if has_norms else heads.float()  # a norm rounds to the dtype of its input
    return (
        Result(query, lambda: reference_store(given, *angles, expected, slots, **norms)),
        Result(cache, lambda: expected, WRITTEN),
        Result(cache[1], lambda: expected[1].to(cache.dtype), assert_same_bits),
    )


def rotate_and_store_fp8(inputs: Inputs, rows: str, has_norms: bool) -> Results:
    """Stores in FP8. The stored KV must equal that of a cache without scales, multiplied by the
    scales.
    """
    heads, angles, slots, norms = _new_tokens(inputs, rows)
    norms = norms if has_norms else {}
    unscaled, cache = _cache_for(inputs, heads), _cache_for(inputs, heads, FP8)
    num_kv_heads, block_size = cache.shape[2:4]
    scales = inputs.random(2, num_kv_heads, dtype=torch.float32, seed=4).abs() + 0.1
    expected_query = storing.rotate_and_store(heads, *angles, unscaled, slots, **norms)
    query = storing.rotate_and_store(heads, *angles, cache, slots, **norms, kv_scales=scales)

    def wanted() -> Tensor:
        by_slot = unscaled.transpose(2, 3).flatten(1, 2)  # [2, slots, num_kv_heads, D]
        stored = slots[slots >= 0]
        expected = empty_cache(len(heads), num_kv_heads, block_size, heads, FP8)
        store_kv(*by_slot[:, stored], expected, stored, kv_scales=scales)
        return expected

    return (
        Result(query, lambda: expected_query, assert_equal),
        Result(cache, wanted, assert_same_bits),
    )


def _new_tokens(
    inputs: Inputs, rows: str
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, dict[str, Tensor | float]]:
    """Returns heads, cosines and sines, slots, and norms."""
    sizes, num_tokens = inputs.sizes, inputs.sizes.rows[rows]
    heads = inputs.random(num_tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    num_slots = (-(-num_tokens // sizes.block_size) + 2) * sizes.block_size
    norms = {
        "query_norm": inputs.random(sizes.head_dim, seed=1),
        "key_norm": inputs.random(sizes.head_dim, seed=2),
        "eps": EPS,
    }
    angles = inputs.angles(num_tokens, sizes.head_dim // 2)
    return heads, angles, slots_of(num_tokens, num_slots, inputs.device), norms


def _cache_for(inputs: Inputs, heads: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    sizes = inputs.sizes
    shape = len(heads), sizes.kv_heads, sizes.block_size
    return empty_cache(*shape, heads, dtype or sizes.dtype)


def rotate_and_store_latent(inputs: Inputs, heads: str, rows: str) -> Results:
    latent, num_tokens = inputs.sizes.latent, inputs.sizes.rows[rows]
    width, rope = latent["width"], latent["rope"]
    query = inputs.random(num_tokens, latent["heads"][heads], width + rope)[..., width:]
    new, norm = inputs.random(num_tokens, width + rope, seed=1), inputs.random(width, seed=2)
    num_blocks = -(-num_tokens // latent["block_size"]) + 2
    shape = (1, num_blocks, 1, latent["block_size"], width + rope)
    cache = torch.full(shape, torch.nan, dtype=query.dtype, device=query.device)
    expected = cache.clone()
    slots = slots_of(num_tokens, num_blocks * latent["block_size"], inputs.device)
    rest, options = (new, *inputs.angles(num_tokens, rope // 2)), {"norm": norm, "eps": EPS}
    out = storing_latents.rotate_and_store_latent(query, *rest, cache, slots, **options)
    return (
        Result(out, lambda: reference_store_latent(query, *rest, expected, slots, **options)),
        Result(cache, lambda: expected, WRITTEN),
    )


def gather_blocks(inputs: Inputs, is_fp8: bool) -> Results:
    cache, payload, table = _moved(inputs, is_fp8=is_fp8)
    run = table, FIRST_TOKEN, inputs.sizes.moved_tokens
    gathering.gather_blocks(cache, *run, payload)

    def wanted() -> Tensor:
        expected = torch.zeros_like(payload)
        reference_gather(cache, *run, expected)
        return expected

    return (Result(payload, wanted, assert_same_bits),)


def scatter_blocks(inputs: Inputs, is_fp8: bool) -> Results:
    cache, payload, table = _moved(inputs, is_fp8=is_fp8)
    expected = inputs.copy(cache)
    run = table, FIRST_TOKEN, inputs.sizes.moved_tokens
    scattering.scatter_blocks(cache, *run, payload)

    def wanted() -> Tensor:
        reference_scatter(expected, *run, payload)
        return expected

    return (Result(cache, wanted, assert_same_bits),)


def _moved(inputs: Inputs, *, is_fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a cache, a payload, and a sequence's blocks in falling order."""
    sizes = inputs.sizes
    dtype, num_tokens = FP8 if is_fp8 else sizes.dtype, sizes.moved_tokens
    num_blocks = -(-(num_tokens + FIRST_TOKEN) // sizes.block_size)
    planes = NUM_LAYERS, 2
    cache = inputs.random(
        *planes, num_blocks + 2, sizes.kv_heads, sizes.block_size, sizes.head_dim, dtype=dtype
    )
    shape = *planes, num_tokens, sizes.kv_heads, sizes.head_dim
    table = inputs.integers(range(num_blocks, 0, -1), torch.int64)
    return cache, inputs.random(*shape, dtype=dtype, seed=1), table


def copy_blocks(inputs: Inputs, num: str) -> Results:
    """Each block moves to the next one: all but the ends are a source and a destination."""
    sizes, num_copies = inputs.sizes, inputs.sizes.copies[num]
    shape = num_copies + 1, sizes.kv_heads, sizes.block_size, sizes.head_dim
    cache = inputs.random(NUM_LAYERS, 2, *shape)
    expected, blocks = inputs.copy(cache), inputs.integers(range(num_copies), torch.int64)
    copying.copy_blocks(cache, blocks, blocks + 1)

    def wanted() -> Tensor:
        reference_copy(expected, blocks, blocks + 1)
        return expected

    return (Result(cache, wanted, assert_same_bits),)


BOTH = (True, False)
CASES = [
    *cases(rotate_and_store, rows=("batch", "one", "chunk"), has_norms=(False,)),
    *cases(rotate_and_store, rows=("batch",), has_norms=(True,)),
    *cases(rotate_and_store_fp8, op="rotate_and_store", rows=("batch",), has_norms=BOTH),
    *cases(rotate_and_store_latent, heads=("rank", "half", "all"), rows=("batch",)),
    *cases(gather_blocks, is_fp8=BOTH),
    *cases(scatter_blocks, is_fp8=BOTH),
    *cases(copy_blocks, num=("one", "some", "many")),
]
