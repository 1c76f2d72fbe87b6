"""Attention over one plane on the CPU: near FP64, with bits that do not depend on cuts."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.cpu.attention.decode_attention import decode_attention
from kernels.cpu.attention.prefill_attention import prefill_attention
from kernels.cpu.attention.vector_attention import SEGMENT
from kernels.ops import pack_heads, per_head_linear
from tests.kernels.support.compiled_first import compile_calls_first

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
BLOCK_SIZE = 16
SIZES = [(3, 28, 20), (16, 576, 512)]  # heads, width, of values


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_calls_first(attend_to_latents)


def attend_to_latents() -> None:
    for dtype, (_, width, value_dim) in product(TOLERANCE, SIZES):
        for scale in (None, 1.0):
            latents, query = Latents(1, width, dtype), torch.zeros(1, 1, width, dtype=dtype)
            if scale is not None:
                latents.store_in_fp8(scale)
            latents.prefill(query, 1, value_dim)
            latents.decode(query, torch.ones(1).long(), value_dim)


class Latents:
    """A context in blocks of random order; NaN where nothing is stored."""

    scales: Tensor | None = None  # [2, 1]

    def __init__(self, num_tokens: int, width: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(num_tokens)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.table = torch.randperm(num_blocks + 3, generator=rng)[:num_blocks]
        self.rows = torch.randn(num_tokens, width, generator=rng).to(dtype)
        self.cache = torch.full((1, num_blocks + 3, 1, BLOCK_SIZE, width), torch.nan, dtype=dtype)
        for token, row in enumerate(self.rows):
            self.cache[0, self.table[token // BLOCK_SIZE], 0, token % BLOCK_SIZE] = row

    def attend(self, query: Tensor, position: int, value_dim: int) -> Tensor:
        seen = self.rows[: position + 1].double()
        scores = query.double() @ seen.T / math.sqrt(query.shape[1])
        return scores.softmax(-1) @ seen[:, :value_dim]

    def prefill(self, query: Tensor, end: int, value_dim: int) -> Tensor:
        starts, lens = torch.tensor([0, len(query)]), torch.tensor([end])
        rest = self.table.unsqueeze(0), starts, lens, query.shape[2] ** -0.5
        return prefill_attention(
            query, self.cache, *rest, value_dim=value_dim, kv_scales=self.scales
        )

    def decode(self, query: Tensor, context_lens: Tensor, value_dim: int) -> Tensor:
        tables = self.table.expand(len(query), -1)
        rest = tables, context_lens, query.shape[2] ** -0.5
        options = {"value_dim": value_dim, "kv_scales": self.scales}
        return decode_attention(query, self.cache, *rest, **options)

    def store_in_fp8(self, scale: float) -> None:
        """The rows become what the cache then holds."""
        self.scales = torch.full((2, 1), scale)
        self.cache = (self.cache.float() / scale).to(torch.float8_e4m3fn)
        self.rows = (self.rows.float() / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("num_heads", "width", "value_dim"), SIZES)
def test_prefill_and_decode_equal_fp64_and_each_other(
    num_heads: int, width: int, value_dim: int, dtype: torch.dtype, scale: float | None
) -> None:
    """`scale`: of a cache in FP8."""
    latents = Latents(131, width, dtype)
    if scale is not None:
        latents.store_in_fp8(scale)
    query = (torch.randn(131, num_heads, width) * 2).to(dtype)
    out = latents.prefill(query, 131, value_dim)
    assert out.shape == (131, num_heads, value_dim)
    expected = torch.stack([latents.attend(q, i, value_dim) for i, q in enumerate(query)])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(latents.decode(query, torch.arange(1, 132), value_dim), out)


def test_bits_do_not_depend_on_chunks_across_segments() -> None:
    num_tokens = SEGMENT + 100
    latents = Latents(num_tokens, 40, torch.bfloat16)
    query = torch.randn(num_tokens, 5, 40).bfloat16()
    whole = latents.prefill(query, num_tokens, 32)
    for size in (7, 64):
        chunks = [
            latents.prefill(query[at : at + size], min(at + size, num_tokens), 32)
            for at in range(0, num_tokens, size)
        ]
        assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.long
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "rows"), [(128, 512), (12, 20)])
def test_rows_of_products_per_head_do_not_depend_on_each_other(
    width: int, rows: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(4, rows, width).to(dtype)
    x = torch.randn(33, 4, 5 + width).to(dtype)[..., 5:]
    packed = pack_heads(weight)
    together = per_head_linear(x, packed)
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    error = (together.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]
    for count in (1, 2, 3, 16):
        assert torch.equal(per_head_linear(x[:count], packed), together[:count])
