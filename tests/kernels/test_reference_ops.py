"""The reference ops against their formulas, in FP64 where the formula is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.reference.tiles import tree_sum
from torch import Tensor

from kernels.reference.decode_attention import decode_attention
from kernels.reference.gather_blocks import gather_blocks
from kernels.reference.gelu_and_mul import gelu_and_mul
from kernels.reference.prefill_attention import prefill_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.scatter_blocks import scatter_blocks
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.store_kv import store_kv

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 63, 100])
def test_rms_norm(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = _random(num_rows, 50, dtype=dtype), _random(50, seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    _near(rms_norm(x, weight, 1e-5), expected)
    shifted = rms_norm(x, weight, 1e-5, has_unit_offset=True)
    _near(shifted, expected / weight.double() * (1 + weight.double()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary(dtype: torch.dtype) -> None:
    x, angles = _random(7, 3, 10, dtype=dtype), _random(7, 5, seed=1).double()
    pairs = torch.complex(x.double()[..., :5], x.double()[..., 5:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    _near(rotary(x, angles.cos().float(), angles.sin().float()), expected)
    wider = torch.cat((x, x[..., :3]), dim=-1)
    partly = rotary(wider, angles.cos().float(), angles.sin().float())
    _near(partly[..., :10], expected)
    assert torch.equal(partly[..., 10:], x[..., :3])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [13, 64, 320])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    x = _random(9, 2 * width, dtype=dtype) * 8
    gate, up = x.double().chunk(2, dim=-1)
    _near(silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    assert silu_and_mul(torch.tensor([[-200.0, 1.0]])).tolist() == [[-0.0]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [13, 64, 320])
def test_gelu_and_mul(width: int, dtype: torch.dtype) -> None:
    x = _random(9, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    _near(gelu_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert gelu_and_mul(torch.tensor([[-200.0, 1.0]])).tolist() == [[-0.0]]


def test_store_kv_writes_its_slots_and_skips_minus_one() -> None:
    cache = torch.full((2, 4, 3, 8, 6), torch.nan)
    key, value = _random(5, 3, 6), _random(5, 3, 6, seed=1)
    slots = torch.tensor([31, -1, 0, 17, 9])
    store_kv(key, value, cache, slots)
    by_slot = cache.transpose(1, 2).reshape(2, 3, 32, 6)
    for token in (0, 2, 3, 4):
        assert torch.equal(by_slot[0, :, slots[token]], key[token])
        assert torch.equal(by_slot[1, :, slots[token]], value[token])
    assert int(torch.isfinite(cache).sum()) == 4 * 2 * 3 * 6


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 4), (0, 20), (7, 9), (19, 1)])
def test_gather_and_scatter_blocks(first: int, count: int) -> None:
    cache = _random(2, 2, 9, 3, 4, 6)
    table = torch.tensor([7, 2, 0, 5, 8])
    wire = torch.full((2, 2, count, 3, 6), torch.nan)
    gather_blocks(cache, table, first, count, wire)
    for index in range(count):
        block, offset = table[(first + index) // 4], (first + index) % 4
        assert torch.equal(wire[:, :, index], cache[:, :, block, :, offset])
    other = cache.clone()
    new = _random(2, 2, count, 3, 6, seed=3)
    scatter_blocks(other, table, first, count, new)
    assert int((other != cache).sum()) == new.numel()
    gather_blocks(other, table, first, count, wire)
    assert torch.equal(wire, new)


def test_tree_sum_does_not_see_appended_zeros() -> None:
    x = _random(2, 13, 5) * 1000
    for num_zeros in (1, 3, 19):
        padded = torch.cat((x, torch.zeros(2, num_zeros, 5)), dim=1)
        assert torch.equal(tree_sum(padded), tree_sum(x))


def test_tree_sum_does_not_see_zeros_left_out_before() -> None:
    x = _random(2, 13, 5) * 1000
    for num_zeros in (1, 3, 4, 19):
        padded = torch.cat((torch.zeros(2, num_zeros, 5), x), dim=1)
        assert torch.equal(tree_sum(padded), tree_sum(x, num_zeros))


@pytest.mark.parametrize("gate", [silu_and_mul, gelu_and_mul])
@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_number_of_threads_nor_of_rows(
    num_threads: int, width: int, gate: Callable[[Tensor], Tensor]
) -> None:
    x = _random(1111, 2 * width)
    expected = torch.cat([gate(row) for row in x.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(gate(x), expected)
    finally:
        torch.set_num_threads(before)


def _paged(num_seqs: int, num_blocks: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    cache = _random(2, num_seqs * num_blocks, heads, 16, dim)
    order = torch.randperm(num_seqs * num_blocks, generator=torch.Generator().manual_seed(2))
    return cache, order.view(num_seqs, num_blocks)


def _naive(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    context_len: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """FP64 attention of the last tokens of one sequence. query [Q, num_heads, D]."""
    num_tokens, num_heads, dim = query.shape
    kv = cache[:, table].double().transpose(1, 2).flatten(2, 3)[:, :, :context_len]
    key, value = kv.repeat_interleave(num_heads // kv.shape[1], dim=1)
    scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * dim**-0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    visible = torch.ones(num_tokens, context_len).tril(context_len - num_tokens).bool()
    if window is not None:
        visible = visible.triu(context_len - num_tokens - window + 1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1)


@pytest.mark.parametrize("dim", [8, 20, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1), (3, 3)])
def test_attention(num_heads: int, num_kv_heads: int, dim: int) -> None:
    _attention_holds(num_heads, num_kv_heads, dim)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 100, 200, 1000])
def test_attention_in_a_window_with_capped_scores(
    window: int | None, softcap: float | None
) -> None:
    _attention_holds(3, 1, 20, window=window, softcap=softcap)


def _attention_holds(num_heads: int, num_kv_heads: int, dim: int, **options: Any) -> None:
    """Both functions against FP64, and bit for bit against each other."""
    cache, tables = _paged(4, 20, num_kv_heads, dim)
    query_lens, context_lens = [2, 150, 63, 20], [2, 300, 64, 300]
    query = _random(sum(query_lens), num_heads, dim, seed=4)
    starts = [0, 2, 152, 215, 235]
    out = prefill_attention(
        query,
        cache,
        tables,
        torch.tensor(starts),
        torch.tensor(context_lens),
        dim**-0.5,
        **options,
    )
    for index in range(4):
        rows = slice(starts[index], starts[index + 1])
        expected = _naive(query[rows], cache, tables[index], context_lens[index], **options)
        _near(out[rows], expected)
        lens = torch.arange(context_lens[index] - query_lens[index], context_lens[index]) + 1
        single = decode_attention(
            query[rows], cache, tables[index].expand(len(lens), -1), lens, dim**-0.5, **options
        )
        assert torch.equal(single, out[rows])
        for row in (slice(0, 1), slice(-1, None)):  # alone, more tiles lie before the window
            alone = decode_attention(
                query[rows][row],
                cache,
                tables[index : index + 1],
                lens[row],
                dim**-0.5,
                **options,
            )
            assert torch.equal(alone, single[row])


@pytest.mark.parametrize("left_behind", [torch.nan, torch.inf])
def test_attention_does_not_see_what_others_left_in_the_blocks(left_behind: float) -> None:
    """Behind the context's end, in blocks not reached yet, and in the block that pads a table."""
    cache, tables = _paged(2, 20, 2, 8)
    context_lens, starts = torch.tensor([5, 300]), torch.tensor([0, 2, 4])
    tables[0, 1:] = padding = int(tables[1, 19])
    query = _random(4, 4, 8, seed=4)
    prefilled = prefill_attention(query, cache, tables, starts, context_lens, 0.3)
    decoded = decode_attention(query[[1, 3]], cache, tables, context_lens, 0.3)

    cache[:, padding] = left_behind
    cache[:, tables[0, 0], :, 5:] = left_behind
    cache[:, tables[1, 18], :, 300 % 16 :] = left_behind
    assert torch.equal(
        prefill_attention(query, cache, tables, starts, context_lens, 0.3), prefilled
    )
    assert torch.equal(decode_attention(query[[1, 3]], cache, tables, context_lens, 0.3), decoded)


def test_a_block_size_that_fits_no_tile_is_refused() -> None:
    cache, tables = torch.zeros(2, 2, 1, 24, 8), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="block_size 24"):
        decode_attention(torch.zeros(1, 1, 8), cache, tables, torch.tensor([5]), 1.0)
