from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.kv.rotate_and_store import rotate_and_store
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotate_and_store
from kernels.reference.store_kv import store_kv as reference_store_kv
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.paged import empty_cache, slots_of
from tests.support.kernels.tolerance import assert_near, assert_same_bits

FP8 = torch.float8_e4m3fn
LENGTHS = [63, 1] if IS_INTERPRETED else [63, 1, 100, 4096]
SHAPES = [  # query heads, KV heads, head_dim, rotary_dim, block_size
    (6, 3, 16, 10, 8),
    (7, 1, 80, 80, 32),
    (8, 2, 80, 32, 16),
    (1, 1, 64, 64, 16),
    (4, 4, 96, 96, 64),
    (8, 1, 128, 128, 16) if IS_INTERPRETED else (32, 8, 128, 128, 16),
    (2, 1, 256, 256, 16),
]


def angles_of(num_tokens: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines as columns of a wider table, as in a model with two frequencies."""
    angles = random(num_tokens, 2, half, like=device, dtype=torch.float32, seed=7)
    return angles.cos()[:, 1], angles.sin()[:, 1]


def norms_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "query_norm": random(head_dim, like=device, dtype=dtype, seed=11),
        "key_norm": random(head_dim, like=device, dtype=dtype, seed=12),
        "eps": 1e-6,
    }


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("norm", ["plain", "offset", "none"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"), SHAPES
)
def test_rotate_and_store(
    num_tokens: int,
    norm: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_all = num_heads + 2 * num_kv_heads
    heads = random(num_tokens, num_all, head_dim, like=device, dtype=dtype)
    cos, sin = angles_of(num_tokens, rotary_dim // 2, device)
    cache = empty_cache(num_tokens, num_kv_heads, block_size, heads, dtype)
    slots = slots_of(num_tokens, cache.shape[1] * block_size, device)
    options = {} if norm == "none" else norms_of(head_dim, dtype, device)
    options["has_unit_offset"] = norm == "offset"
    # a norm rounds internally, so the reference uses the same dtype
    wide = torch.float32 if norm == "none" else dtype
    expected = cache.to(wide)
    with poisoned_outputs():
        query = rotate_and_store(heads, cos, sin, cache, slots, **options)
    expected_query = reference_rotate_and_store(
        heads.to(wide), cos, sin, expected, slots, **options
    )
    assert query.shape == (num_tokens, num_heads, head_dim)
    assert query.dtype == dtype
    assert_near(query, expected_query)
    assert torch.equal(cache.isnan(), expected.isnan())
    assert_near(cache.nan_to_num(), expected.nan_to_num())
    assert_same_bits(cache[1], expected[1].to(dtype))  # values, unchanged


def test_angles_of_zero_rotate_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """As in layers without rope: keys and queries keep their bits."""
    heads = random(9, 6, 16, like=device, dtype=dtype)
    cos = torch.ones(9, 8, device=device)
    cache = torch.zeros(2, 1, 2, 16, 16, dtype=dtype, device=device)
    slots = torch.arange(9, device=device)
    query = rotate_and_store(heads, cos, torch.zeros_like(cos), cache, slots)
    assert torch.equal(query, heads[:, :2])
    assert torch.equal(cache[:, 0, :, :9].permute(2, 0, 1, 3).flatten(1, 2), heads[:, 2:])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_fp8_cache(
    rotary_dim: int, index: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """The stored values equal those of the unscaled cache, scaled."""
    heads = random(30, 10, 64, like=device, dtype=dtype) * 30
    cos, sin = angles_of(30, rotary_dim // 2, device)
    scales = torch.tensor([[0.25, 1.0], [0.1, 7.0]], device=device)
    unscaled, cache = (empty_cache(30, 2, 16, heads, each) for each in (dtype, FP8))
    slots = slots_of(30, 64, device).to(index)
    options = norms_of(64, dtype, device)
    unscaled_query = rotate_and_store(heads, cos, sin, unscaled, slots, **options)
    with poisoned_outputs():
        query = rotate_and_store(heads, cos, sin, cache, slots, **options, kv_scales=scales)
    assert torch.equal(query, unscaled_query)
    by_slot = unscaled.transpose(2, 3).flatten(1, 2)  # [2, slots, num_kv_heads, D]
    tokens = torch.nonzero(slots >= 0).squeeze(1)
    key, value = by_slot[:, slots[tokens]]
    expected = empty_cache(30, 2, 16, heads, FP8)
    reference_store_kv(key, value, expected, slots[tokens], kv_scales=scales)
    assert int(expected.float().abs().eq(448).sum()) > 10
    assert_same_bits(cache, expected)


def test_fp8_rounding(dtype: torch.dtype, device: torch.device) -> None:
    """Every power of two in FP8, ties, and saturation: tested on values, which are not rotated."""
    rng = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-12, 12, (40, 3, 64), generator=rng).to(device)
    heads = torch.zeros(80, 7, 64, device=device)
    heads[:40, 4:] = random(40, 3, 64, like=device, dtype=torch.float32) * sizes
    heads[40:, 4:] = torch.arange(40 * 3 * 64, device=device).view(40, 3, 64) / 64 - 60
    heads = heads.to(dtype)
    if not IS_INTERPRETED:  # which turns NaN into a number
        heads[3, 5, 5] = torch.nan
    scales = torch.tensor([[1.0, 1.0, 1.0], [0.1, 1.0, 3.0]], device=device)
    cos, sin = angles_of(80, 32, device)
    cache = empty_cache(80, 3, 16, heads, FP8)
    expected = cache.clone()
    slots = slots_of(80, cache.shape[1] * 16, device)
    rotate_and_store(heads, cos, sin, cache, slots, kv_scales=scales)
    reference_store_kv(heads[:, 1:4], heads[:, 4:], expected, slots, kv_scales=scales)
    assert int(expected[1].float().abs().eq(448).sum()) > 100
    assert_same_bits(cache[1], expected[1])


def test_token_does_not_depend_on_the_others(dtype: torch.dtype, device: torch.device) -> None:
    heads = random(100, 7, 80, like=device, dtype=dtype)
    cos, sin = angles_of(100, 40, device)
    cache = torch.zeros(2, 7, 1, 16, 80, dtype=dtype, device=device)
    slots = torch.arange(100, device=device)
    options = norms_of(80, dtype, device)
    together = rotate_and_store(heads, cos, sin, cache, slots, **options)
    stored = cache.clone()
    for rows in (slice(0, 1), slice(31, 38), slice(99, 100)):
        alone = rotate_and_store(heads[rows], cos[rows], sin[rows], cache, slots[rows], **options)
        assert torch.equal(alone, together[rows])
    assert torch.equal(cache, stored)


def test_no_tokens(device: torch.device) -> None:
    cos, sin = angles_of(0, 8, device)
    cache = torch.zeros(2, 1, 2, 16, 16, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    heads = torch.empty(0, 6, 16, device=device)
    assert rotate_and_store(heads, cos, sin, cache, slots).shape == (0, 2, 16)


def test_invalid_arguments_raise(device: torch.device) -> None:
    heads = torch.ones(3, 6, 16, device=device)
    cos, sin = angles_of(3, 8, device)
    cache = torch.zeros(2, 4, 2, 16, 16, device=device)
    slots = torch.arange(3, device=device)
    norm = torch.ones(16, device=device)
    for match, arguments in {
        r"heads has shape \[3, 96\]": (heads.view(3, 96), cos, sin, cache, slots),
        r"cos has shape \[2, 8\], not \[3, any\]": (heads, cos[:2], sin, cache, slots),
        r"cos is torch.float16": (heads, cos.half(), sin, cache, slots),
        r"sin has shape \[3, 7\], not \[3, 8\]": (heads, cos, sin[:, :7], cache, slots),
        r"cos has 8 columns for heads of 15": (heads[..., :15], cos, sin, cache, slots),
        r"kv_cache is torch.float16, not torch.float32": (heads, cos, sin, cache.half(), slots),
        r"kv_cache is not contiguous": (heads, cos, sin, cache[:, ::2], slots),
        r"slot_mapping is torch.float32": (heads, cos, sin, cache, slots.float()),
        r"kv_cache has shape .* not \[2, any, 2, any, 16\]": (
            *(heads, cos, sin, cache[..., :8], slots),
        ),
        r"kv_cache has shape \[2, 4, 2\]": (heads, cos, sin, cache[..., 0, 0], slots),
        r"slot_mapping has shape \[2\], not \[3\]": (heads, cos, sin, cache, slots[:2]),
        r"heads has 4 heads: no query with 2": (heads[:, :4], cos, sin, cache, slots),
    }.items():
        with pytest.raises(BadTensor, match=match):
            rotate_and_store(*arguments)
    for match, options in {
        r"one of query_norm and key_norm is missing": {"query_norm": norm},
        r"key_norm has shape \[15\]": {"query_norm": norm, "key_norm": norm[:15]},
        r"query_norm is torch.float16": {"query_norm": norm.half(), "key_norm": norm},
        r"not torch.float8_e4m3fn": {"kv_scales": torch.ones(2, 2, device=device)},
    }.items():
        with pytest.raises(BadTensor, match=match):
            rotate_and_store(heads, cos, sin, cache, slots, **options)
    narrow = torch.ones(2, 1, device=device)
    with pytest.raises(BadTensor, match=r"kv_scales has shape \[2, 1\], not \[2, 2\]"):
        rotate_and_store(heads, cos, sin, cache.to(FP8), slots, kv_scales=narrow)
