from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.kv.copy_blocks import copy_blocks
from kernels.gpu.kv.gather_blocks import gather_blocks
from kernels.gpu.kv.scatter_blocks import scatter_blocks
from kernels.torch_ops.gather_blocks import gather_blocks as reference_gather_blocks
from kernels.torch_ops.scatter_blocks import scatter_blocks as reference_scatter_blocks
from tests.support.kernels.inputs import random
from tests.support.kernels.tolerance import assert_same_bits

NUM_LAYERS = 2 if IS_INTERPRETED else 32
RUNS = [(5, 63), (7, 100), (0, 63), (64, 64), (15, 1), (0, 1)]  # first token, number of tokens
SHAPES = [(3, 6, 5), (3, 80, 32), (1, 64, 16), (2, 96, 64), (8, 128, 16), (2, 256, 16)]


def paged(
    num_tokens: int, num_kv_heads: int, block_size: int, head_dim: int, like: torch.device
) -> tuple[Tensor, Tensor]:
    """A cache of all layers in FP32, and a sequence's block table in random order."""
    num_blocks = -(-num_tokens // block_size)
    order = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(4))
    shape = (NUM_LAYERS, 2, num_blocks + 2, num_kv_heads, block_size, head_dim)
    return random(*shape, like=like, dtype=torch.float32), order[:num_blocks].to(like)


def payload_of(cache: Tensor, num_tokens: int) -> Tensor:
    """A payload whose bits are all ones, which are NaN."""
    shape = (cache.shape[0], 2, num_tokens, cache.shape[3], cache.shape[5])
    return torch.full(
        (*shape, cache.element_size()), 255, dtype=torch.uint8, device=cache.device
    ).view(cache.dtype)[..., 0]


@pytest.mark.parametrize(("first", "count"), RUNS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_gather_blocks(
    first: int,
    count: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    cache, table = paged(first + count + 3, num_kv_heads, block_size, head_dim, device)
    cache = cache.to(dtype)
    out, expected = payload_of(cache, count), payload_of(cache, count)
    gather_blocks(cache, table, first, count, out)
    reference_gather_blocks(cache, table, first, count, expected)
    assert_same_bits(out, expected)


def test_caches_of_one_plane(device: torch.device) -> None:
    """Of latents: they are gathered, scattered and copied like the first of two planes."""
    pair, table = paged(70, 1, 16, 24, device)
    cache = pair[:, :1].contiguous()
    out = payload_of(cache, 40)[:, :1].contiguous()
    gather_blocks(cache, table, 7, 40, out)
    expected = payload_of(pair, 40)
    reference_gather_blocks(pair, table, 7, 40, expected)
    assert_same_bits(out, expected[:, :1].contiguous())
    filled = torch.zeros_like(cache)
    scatter_blocks(filled, table, 7, 40, out)
    reference_filled = torch.zeros_like(cache)
    reference_scatter_blocks(reference_filled, table, 7, 40, out)
    assert_same_bits(filled, reference_filled)
    copy_blocks(filled, table[:2], table[2:4])
    assert_same_bits(filled[:, :, table[2:4]], reference_filled[:, :, table[:2]])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float32])
def test_any_dtype_is_moved(cache_dtype: torch.dtype, device: torch.device) -> None:
    cache, table = paged(68, 3, 16, 80, device)
    cache = cache.to(cache_dtype)
    out, expected = payload_of(cache, 63), payload_of(cache, 63)
    gather_blocks(cache, table.int(), 5, 63, out)
    reference_gather_blocks(cache, table, 5, 63, expected)
    assert_same_bits(out, expected)
    filled, wanted = torch.zeros_like(cache), torch.zeros_like(cache)
    scatter_blocks(filled, table.int(), 5, 63, out)
    reference_scatter_blocks(wanted, table, 5, 63, expected)
    assert_same_bits(filled, wanted)


def test_invalid_arguments_raise(device: torch.device) -> None:
    cache, table = paged(30, 2, 16, 64, device)
    out = payload_of(cache, 20)
    for match, arguments in {
        r"kv_cache has shape \[2, ": (cache[0], table, 0, 20, out),
        r"kv_cache is not contiguous": (cache[:, :, ::2], table, 0, 20, out),
        r"block_table is torch.float32": (cache, table.float(), 0, 20, out),
        r"payload has shape \[2, 2, 20, 2, 64\], not \[2, 2, 19, 2, 64\]": (
            *(cache[:2], table, 0, 19, out[:2]),
        ),
        r"payload is torch.float32, not torch.float16": (cache.half(), table, 0, 20, out),
        r"tokens \[13, 33\) are outside the 2 blocks": (cache, table, 13, 20, out),
        r"tokens \[-1, 19\) are outside": (cache, table, -1, 20, out),
    }.items():
        with pytest.raises(BadTensor, match=match):
            gather_blocks(*arguments)
