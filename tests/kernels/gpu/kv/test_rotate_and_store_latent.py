from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.kv.rotate_and_store_latent import rotate_and_store_latent
from kernels.reference.rotate_and_store_latent import rotate_and_store_latent as reference
from kernels.reference.store_kv import scaled_bytes
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

BLOCK_SIZE, NUM_TOKENS = 16, 37


@pytest.mark.parametrize(
    ("num_heads", "latent_dim", "rope_dim"), [(3, 20, 8), (5, 48, 10), (1, 32, 2), (16, 512, 64)]
)
def test_rotate_and_store_latent(
    num_heads: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    width = latent_dim + rope_dim
    wide = random(NUM_TOKENS, num_heads, 12 + rope_dim, like=device, dtype=dtype)
    query = wide[..., 12:]  # a part of a projection
    latent = random(NUM_TOKENS, width, like=device, dtype=dtype, seed=1)
    angles = random(NUM_TOKENS, rope_dim // 2, like=device, dtype=torch.float32, seed=2)
    norm = random(latent_dim, like=device, dtype=dtype, seed=3)
    slots = torch.randperm(4 * BLOCK_SIZE)[:NUM_TOKENS].to(device)
    slots[5] = -1
    caches = [torch.full((1, 4, 1, BLOCK_SIZE, width), torch.nan, device=device) for _ in range(2)]
    out_cache, expected_cache = (each.to(dtype) for each in caches)
    rest = latent, angles.cos(), angles.sin()
    longer = torch.full((NUM_TOKENS, num_heads, width), 3.0, dtype=dtype, device=device)
    with poisoned_outputs():
        out = rotate_and_store_latent(query, *rest, out_cache, slots, norm=norm, eps=1e-2)
    part = longer[..., latent_dim:]
    rotate_and_store_latent(query, *rest, out_cache, slots, norm=norm, eps=1e-2, out=part)
    assert torch.equal(longer[..., latent_dim:], out)
    assert bool((longer[..., :latent_dim] == 3).all())
    expected = reference(query, *rest, expected_cache, slots, norm=norm, eps=1e-2)
    assert_near(out, expected.float())
    assert torch.equal(out_cache.isnan(), expected_cache.isnan())
    assert_near(out_cache.nan_to_num(), expected_cache.nan_to_num().float())


def test_rows_in_fp8_are_those_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: the row that a cache of the queries' dtype would hold, divided and rounded."""
    shape = (1, 4, 1, BLOCK_SIZE, 28)
    query = random(NUM_TOKENS, 3, 8, like=device, dtype=dtype)
    latent = random(NUM_TOKENS, 28, like=device, dtype=dtype, seed=1)
    angles = random(NUM_TOKENS, 4, like=device, dtype=torch.float32, seed=2)
    options = {"norm": random(20, like=device, dtype=dtype, seed=3), "eps": 1e-2}
    slots = torch.randperm(4 * BLOCK_SIZE)[:NUM_TOKENS].to(device)
    slots[5] = -1
    scales = torch.full((2, 1), 0.003, device=device)
    cache, plain = (torch.full(shape, 7.0, device=device) for _ in range(2))
    cache, plain = cache.to(torch.float8_e4m3fn), plain.to(dtype)
    rest = latent, angles.cos(), angles.sin()
    out = rotate_and_store_latent(query, *rest, cache, slots, kv_scales=scales, **options)
    assert torch.equal(out, rotate_and_store_latent(query, *rest, plain, slots, **options))
    kept = slots[slots >= 0]
    expected = torch.full(shape, 7.0, device=device).to(cache.dtype).view(torch.uint8).view(-1, 28)
    expected[kept] = scaled_bytes(plain.view(-1, 1, 28)[kept], scales[0])[:, 0]
    assert torch.equal(cache.view(torch.uint8).view(-1, 28), expected)
    assert int(cache.float().abs().eq(448).sum()) > 10
    other = torch.full(shape, 7.0, device=device).to(cache.dtype)
    reference(query, *rest, other, slots, kv_scales=scales, **options)
    assert_near(cache.float(), other.float())
    with pytest.raises(BadTensor, match="kv_cache is"):
        rotate_and_store_latent(query, *rest, cache, slots, **options)


def test_invalid_arguments_raise(device: torch.device) -> None:
    query, latent = torch.ones(2, 3, 8, device=device), torch.ones(2, 28, device=device)
    angles, slots = torch.ones(2, 4, device=device), torch.zeros(2, dtype=torch.int64)
    cache, norm = torch.ones(1, 1, 1, 16, 28, device=device), torch.ones(20, device=device)
    rest = angles, angles, cache, slots.to(device)
    with pytest.raises(BadTensor, match=r"latent has shape \[2, 27\], not \[2, 28\]"):
        rotate_and_store_latent(query, latent[:, :27], *rest, norm=norm, eps=1e-6)
    with pytest.raises(BadTensor, match=r"kv_cache has shape .* not \[1, any, 1, any, 28\]"):
        pair = cache.expand(2, -1, -1, -1, -1)
        rotate_and_store_latent(query, latent, *rest[:2], pair, rest[3], norm=norm, eps=1e-6)
