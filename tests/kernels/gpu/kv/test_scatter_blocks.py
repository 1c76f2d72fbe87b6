from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.kv.scatter_blocks import scatter_blocks
from kernels.torch_ops.scatter_blocks import scatter_blocks as reference_scatter_blocks
from tests.kernels.gpu.kv.test_gather_blocks import RUNS, SHAPES, paged, payload_of
from tests.support.kernels.inputs import random
from tests.support.kernels.tolerance import assert_same_bits


@pytest.mark.parametrize(("first", "count"), RUNS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_scatter_blocks(
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
    expected = cache.clone()
    payload = random(*payload_of(cache, count).shape, like=device, dtype=dtype, seed=9)
    scatter_blocks(cache, table, first, count, payload)
    reference_scatter_blocks(expected, table, first, count, payload)
    assert_same_bits(cache, expected)


def test_no_tokens(device: torch.device) -> None:
    cache, table = paged(5, 2, 16, 64, device)
    before = cache.clone()
    scatter_blocks(cache, table, 3, 0, payload_of(cache, 0))
    assert torch.equal(cache, before)


def test_invalid_arguments_raise(device: torch.device) -> None:
    cache, table = paged(30, 2, 16, 64, device)
    payload = payload_of(cache, 20)
    for match, arguments in {
        r"kv_cache is not contiguous": (cache[:, :, ::2], table, 0, 20, payload),
        r"block_table has shape \[1, 2\]": (cache, table[None], 0, 20, payload),
        r"payload is not contiguous": (cache, table, 0, 10, payload[:, :, ::2]),
        r"tokens \[13, 33\) are outside the 2 blocks": (cache, table, 13, 20, payload),
    }.items():
        with pytest.raises(BadTensor, match=match):
            scatter_blocks(*arguments)
