from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.kv.copy_blocks import MAX_COPIES, copy_blocks
from kernels.torch_ops.copy_blocks import copy_blocks as reference_copy_blocks
from tests.support.kernels.inputs import random
from tests.support.kernels.tolerance import assert_same_bits

NUM_LAYERS = 2 if IS_INTERPRETED else 32


def cache_of(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, like: torch.device
) -> Tensor:
    shape = (NUM_LAYERS, 2, num_blocks, num_kv_heads, block_size, head_dim)
    return random(*shape, like=like, dtype=torch.float32)


@pytest.mark.parametrize("num_copies", [63, 7, 2, 1])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [(3, 6, 5), (3, 80, 32), (1, 64, 16), (8, 128, 16), (1, 3, 1)],
)
def test_copy_blocks(
    num_copies: int,
    index: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Sources and destinations in random order: many blocks are both."""
    generator = torch.Generator().manual_seed(8)
    sources = torch.randint(0, 64, (num_copies,), generator=generator).to(device, index)
    destinations = torch.randperm(64, generator=generator)[:num_copies].to(device, index)
    cache = cache_of(64, num_kv_heads, block_size, head_dim, device).to(dtype)
    expected = cache.clone()
    copy_blocks(cache, sources, destinations)
    reference_copy_blocks(expected, sources, destinations)
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float32])
def test_blocks_in_a_ring(cache_dtype: torch.dtype, device: torch.device) -> None:
    num_blocks = 20 if IS_INTERPRETED else 100
    cache = cache_of(num_blocks, 2, 16, 64, device).to(cache_dtype)
    before, blocks = cache.clone(), torch.arange(num_blocks, device=device)
    copy_blocks(cache, blocks, blocks.roll(1))
    assert_same_bits(cache, before.view(torch.uint8).roll(-1, 2))


def test_more_copies_than_registers_hold(device: torch.device) -> None:
    num_copies = MAX_COPIES + 1
    cache = cache_of(num_copies, 1, 1, 4, device)
    before, blocks = cache.clone(), torch.arange(num_copies, device=device)
    copy_blocks(cache, blocks, blocks.roll(1))
    assert torch.equal(cache, before.roll(-1, 2))


def test_no_copies(device: torch.device) -> None:
    cache = cache_of(3, 1, 1, 4, device)
    before, none = cache.clone(), torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks(cache, none, none)
    assert torch.equal(cache, before)


def test_invalid_arguments_raise(device: torch.device) -> None:
    cache, ids = cache_of(3, 1, 1, 4, device), torch.arange(2, device=device)
    for match, arguments in {
        r"kv_cache is not contiguous": (cache[:, :, ::2], ids, ids),
        r"sources is torch.float32": (cache, ids.float(), ids),
        r"destinations has shape \[1\], not \[2\]": (cache, ids, ids[:1]),
        r"sources is not dense": (cache, torch.arange(4, device=device)[::2], ids),
    }.items():
        with pytest.raises(BadTensor, match=match):
            copy_blocks(*arguments)
