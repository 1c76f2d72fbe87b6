from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.kv.store_kv import store_kv
from kernels.reference.store_kv import store_kv as reference_store_kv
from tests.kernels.gpu.inputs import random
from tests.kernels.gpu.paged import assert_same_bits, empty_cache, slots_of

FP8 = torch.float8_e4m3fn
LENGTHS = [1, 63, 100] if IS_INTERPRETED else [1, 63, 100, 4096]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [(1, 64, 16), (3, 80, 32), (8, 128, 16), (2, 96, 64), (2, 256, 16), (3, 7, 5)],
)
def test_store_kv(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    key, value = (
        random(num_tokens, num_kv_heads, head_dim, like=device, dtype=dtype, seed=seed)
        for seed in (0, 1)
    )
    cache = empty_cache(num_tokens, num_kv_heads, block_size, key, dtype)
    expected = cache.clone()
    slots = slots_of(num_tokens, cache.shape[1] * block_size, device)
    store_kv(key, value, cache, slots)
    reference_store_kv(key, value, expected, slots)
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_fused_projections(
    index: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """Keys and values with queries before them, a token at a time."""
    heads = random(9, 8, 64, like=device, dtype=dtype)
    key, value = heads[:, 4:6], heads[:, 6:]
    cache = empty_cache(9, 2, 16, heads, dtype)
    expected = cache.clone()
    slots = slots_of(9, 32, device).to(index)
    store_kv(key, value, cache, slots)
    reference_store_kv(key, value, expected, slots)
    assert_same_bits(cache, expected)


def test_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Every power of two that FP8 knows, ties, and what saturates."""
    sizes = 2.0 ** torch.randint(-12, 12, (40, 3, 64), generator=torch.Generator().manual_seed(3))
    key = (random(40, 3, 64, like=device, dtype=torch.float32) * sizes.to(device)).to(dtype)
    value = (torch.arange(40 * 3 * 64, device=device).view(40, 3, 64) / 64 - 60).to(dtype)
    if not IS_INTERPRETED:  # which makes a number of NaN
        key[3, 1, 5] = torch.nan
    scales = torch.tensor([[0.25, 1.0, 3.0], [0.1, 7.0, 2.0]], device=device)
    cache = empty_cache(40, 3, 16, key, FP8)
    expected = cache.clone()
    slots = slots_of(40, cache.shape[1] * 16, device)
    store_kv(key, value, cache, slots, kv_scales=scales)
    reference_store_kv(key, value, expected, slots, kv_scales=scales)
    assert int(expected.float().abs().eq(448).sum()) > 100
    assert_same_bits(cache, expected)


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty(0, 2, 16, device=device)
    cache = torch.zeros(2, 1, 2, 16, 16, device=device)
    store_kv(empty, empty, cache, torch.empty(0, dtype=torch.int64, device=device))
    assert not cache.any()


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    key = torch.ones(3, 2, 16, device=device)
    cache = torch.zeros(2, 4, 2, 16, 16, device=device)
    slots = torch.arange(3, device=device)
    scales = torch.ones(2, 2, device=device)
    for match, arguments in {
        r"key has shape \[3, 32\]": (key.view(3, 32), key, cache, slots),
        r"value has shape \[2, 2, 16\], not \[3, 2, 16\]": (key, key[:2], cache, slots),
        r"value is torch.float16": (key, key.half(), cache, slots),
        r"kv_cache has shape .* not \[2, any, 2, any, 16\]": (key, key, cache[:, :, :1], slots),
        r"kv_cache is torch.float16, not torch.float32": (key, key, cache.half(), slots),
        r"kv_cache is not contiguous": (key, key, cache[:, ::2], slots),
        r"slot_mapping has shape \[2\], not \[3\]": (key, key, cache, slots[:2]),
        r"slot_mapping is torch.float32": (key, key, cache, slots.float()),
    }.items():
        with pytest.raises(BadTensor, match=match):
            store_kv(*arguments)
    with pytest.raises(BadTensor, match=r"kv_cache is torch.float32, not torch.float8_e4m3fn"):
        store_kv(key, key, cache, slots, kv_scales=scales)
    with pytest.raises(BadTensor, match=r"kv_scales has shape \[2, 1\], not \[2, 2\]"):
        store_kv(key, key, cache.to(FP8), slots, kv_scales=scales[:, :1])
