"""Attention whose values are the first elements of their keys: one plane, one KV head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.attention.decode_attention import decode_attention
from kernels.gpu.attention.prefill_attention import prefill_attention
from kernels.reference.decode_attention import decode_attention as reference_decode
from kernels.reference.prefill_attention import prefill_attention as reference_prefill
from tests.support.kernels.contexts import Paged, paged
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

LENS = [63, 0, 1, 150, 100]
QUERY_LENS = [40, 0, 1, 37, 100]
SHAPES = [(3, 28, 20, 16), (16, 80, 64, 32), (66, 32, 32, 4)]  # heads, key, value, block size
if not IS_INTERPRETED:
    SHAPES += [(64, 576, 512, 16), (128, 576, 512, 64)]


def _context(head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Paged:
    shape = {"num_kv_heads": 1, "head_dim": head_dim, "block_size": block_size}
    full = paged(LENS, **shape, dtype=dtype, device=device)
    return Paged(full.cache[:1], full.tables, full.context_lens)


def _query_lens(num_heads: int) -> list[int]:
    """For the interpreter more than a tile: it has fewer tokens if there are more heads."""
    longest = 200 // num_heads if IS_INTERPRETED else max(QUERY_LENS)
    return [min(length, longest) for length in QUERY_LENS]


def _starts(query_lens: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(like)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim", "block_size"), SHAPES)
def test_shapes(
    num_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    is_batch_invariant: bool,
    dtype: torch.dtype,
    device: torch.device,
    small_segments: None,
) -> None:
    context = _context(head_dim, block_size, dtype, device)
    tables, lens, scale = context.tables, context.context_lens, head_dim**-0.5
    query = random(len(LENS), num_heads, head_dim, like=device, dtype=dtype)
    options = {"value_dim": value_dim, "is_batch_invariant": is_batch_invariant}
    with poisoned_outputs():
        out = decode_attention(query, context.cache, tables, lens, scale, **options)
    assert out.shape == (len(LENS), num_heads, value_dim)
    wide = context.cache.float()
    expected = reference_decode(query.float(), wide, tables, lens, scale, value_dim=value_dim)
    assert_near(out, expected)

    query_lens = _query_lens(num_heads)
    query = random(sum(query_lens), num_heads, head_dim, like=device, dtype=dtype, seed=1)
    rest = tables, _starts(query_lens, tables), lens, scale
    with poisoned_outputs():
        out = prefill_attention(query, context.cache, *rest, **options)
    assert_near(out, reference_prefill(query.float(), wide, *rest, value_dim=value_dim))


@pytest.mark.each_value(1)
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_cache_in_fp8_is_that_of_its_values(
    is_batch_invariant: bool, dtype: torch.dtype, device: torch.device, small_segments: None
) -> None:
    """Keys have the scale, and values, which are parts of them."""
    context = _context(48, 32, torch.float32, device)
    cache, factor = context.cache.nan_to_num().to(torch.float8_e4m3fn), 0.7
    scales = torch.full((2, 1), factor, device=device)
    wide = cache.float() * factor
    options = {"value_dim": 40, "is_batch_invariant": is_batch_invariant}
    query = random(len(LENS), 16, 48, like=device, dtype=dtype)
    rest = context.tables, context.context_lens, 0.2
    out = decode_attention(query, cache, *rest, kv_scales=scales, **options)
    assert_near(out, reference_decode(query.float(), wide, *rest, value_dim=40))
    assert torch.equal(
        reference_decode(query, cache, *rest, kv_scales=scales, value_dim=40),
        reference_decode(query, wide, *rest, value_dim=40),
    )
    query_lens = _query_lens(16)
    query = random(sum(query_lens), 16, 48, like=device, dtype=dtype, seed=1)
    rest = context.tables, _starts(query_lens, context.tables), context.context_lens, 0.2
    out = prefill_attention(query, cache, *rest, kv_scales=scales, **options)
    assert_near(out, reference_prefill(query.float(), wide, *rest, value_dim=40))


@pytest.mark.each_value(1)
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_an_equal_pair_of_planes_gives_the_same(
    is_batch_invariant: bool, device: torch.device, small_segments: None
) -> None:
    """Keys and values of an ordinary cache, of which the first elements are compared."""
    context = _context(48, 16, torch.float32, device)
    query = random(len(LENS), 4, 48, like=device, dtype=torch.float32)
    rest = context.tables, context.context_lens, 0.2
    pair = context.cache.expand(2, -1, -1, -1, -1).contiguous()
    options = {"is_batch_invariant": is_batch_invariant}
    expected = decode_attention(query, pair, *rest, **options)[..., :32]
    out = decode_attention(query, context.cache, *rest, value_dim=32, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.each_value(1)
@pytest.mark.parametrize("num_heads", [3, 16])
def test_bits_depend_neither_on_the_batch_nor_on_chunks(
    num_heads: int, dtype: torch.dtype, device: torch.device, small_segments: None
) -> None:
    context = _context(48, 16, dtype, device)
    query = random(len(LENS), num_heads, 48, like=device, dtype=dtype)
    options = {"value_dim": 40, "is_batch_invariant": True}
    together = decode_attention(
        query, context.cache, context.tables, context.context_lens, 0.2, **options
    )
    for seq in (0, 3):
        one = context.rows([seq])
        last = query[seq : seq + 1]
        rest = one.cache, one.tables
        alone = decode_attention(last, *rest, one.context_lens, 0.2, **options)
        assert torch.equal(alone[0], together[seq])
        before = random(12, num_heads, 48, like=device, dtype=dtype, seed=5)
        chunk = torch.cat((before, last))
        starts = _starts([13], one.tables)
        prefilled = prefill_attention(chunk, *rest, starts, one.context_lens, 0.2, **options)
        assert torch.equal(prefilled[12], together[seq])


def test_invalid_arguments_raise(device: torch.device) -> None:
    context = _context(48, 16, torch.float32, device)
    query = random(len(LENS), 4, 48, like=device, dtype=torch.float32)
    tables, lens = context.tables, context.context_lens
    with pytest.raises(BadTensor, match="values of 49 elements in keys of 48"):
        decode_attention(query, context.cache, tables, lens, 1.0, value_dim=49)
    with pytest.raises(BadTensor, match=r"kv_cache has shape .* not \[2, any, any, any, 48\]"):
        decode_attention(query, context.cache, tables, lens, 1.0)
    scales = torch.ones(1, 1, device=device)
    with pytest.raises(BadTensor, match=r"kv_scales has shape \[1, 1\], not \[2, 1\]"):
        decode_attention(query, context.cache, tables, lens, 1.0, kv_scales=scales, value_dim=32)
