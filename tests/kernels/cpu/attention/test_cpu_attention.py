"""The compiled attention kernels are near FP64, and their bits do not depend on cuts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu.attention.decode_attention import decode_attention
from kernels.cpu.attention.prefill_attention import prefill_attention
from kernels.cpu.attention.vector_attention import SEGMENT
from shared.kv_layout import Chunk, Reach, Window, first_seen
from tests.kernels.support.compiled_first import compile_first
from tests.kernels.support.lower import lower_of
from tests.support.grids import in_short_run
from tests.support.threads import computing_threads

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(1, 1, 10, 4), (7, 1, 64, 16), (6, 2, 80, 64), (8, 1, 96, 32)]
REACHES = [(None, None), (Window(1), None), (Window(37), 2.5), (Chunk(40), None), (None, 2.5)]
# Each form of the kernel without and with a mask: a cache read in place, copies, and tiles.
SHORT = {
    (torch.float32, 7, 1, 64, 16, None, None),
    (torch.float32, 8, 1, 96, 32, Window(37), 2.5),
    (torch.float32, 1, 1, 10, 4, None, None),
    (torch.bfloat16, 1, 1, 10, 4, None, 2.5),
    (torch.bfloat16, 6, 2, 80, 64, Window(1), None),
    (torch.bfloat16, 7, 1, 64, 16, Chunk(40), None),
    (torch.bfloat16, 8, 1, 96, 32, None, None),
}
CASES = [(dtype, *shape, *reach) for dtype in DTYPES for shape in SHAPES for reach in REACHES]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_first("float32")
    for dtype in ("float32", "bfloat16"):
        compile_first(dtype, head_dim=20)


class Paged:
    """A context of `num_tokens` in blocks of random order; NaN where nothing is stored."""

    def __init__(
        self, num_tokens: int, *, heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        rng = torch.Generator().manual_seed(num_tokens)
        num_blocks = -(-num_tokens // block_size)
        self.table = torch.randperm(num_blocks + 3, generator=rng)[:num_blocks]
        shape = (2, num_blocks + 3, heads, block_size, head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=dtype)
        self.kv = torch.randn(2, num_tokens, heads, head_dim, generator=rng).to(dtype)
        for token in range(num_tokens):
            block = self.table[token // block_size]
            self.cache[:, block, :, token % block_size] = self.kv[:, token]

    def attend(
        self,
        query: Tensor,
        position: int,
        reach: Reach,
        cap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [num_heads, D] at `position`, in FP64."""
        start = first_seen(reach, position)
        group = query.shape[0] // self.kv.shape[2]
        key, value = self.kv[:, start : position + 1].double().repeat_interleave(group, dim=2)
        scores = torch.einsum("hd,thd->ht", query.double(), key) / math.sqrt(query.shape[1])
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = weights * (scores.logsumexp(-1) - sinks.double()).sigmoid()[:, None]
        return torch.einsum("ht,thd->hd", weights, value)


def prefill(
    paged: Paged, query: Tensor, context_len: int, reach: Reach, cap: float | None
) -> Tensor:
    return prefill_attention(
        query,
        paged.cache,
        paged.table.unsqueeze(0),
        torch.tensor([0, len(query)]),
        torch.tensor([context_len]),
        query.shape[2] ** -0.5,
        lower=lower_of(reach, [len(query)], [context_len], query.device),
        softcap=cap,
    )


def decode(
    paged: Paged, query: Tensor, context_lens: Tensor, reach: Reach, cap: float | None
) -> Tensor:
    return decode_attention(
        query,
        paged.cache,
        paged.table.expand(len(query), -1),
        context_lens,
        query.shape[2] ** -0.5,
        lower=lower_of(reach, [1] * len(query), context_lens.tolist(), query.device),
        softcap=cap,
    )


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "reach", "cap"),
    in_short_run(SHORT, CASES),
)
def test_prefill_and_decode_equal_fp64_and_each_other(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    reach: Reach,
    cap: float | None,
    dtype: torch.dtype,
) -> None:
    num_tokens = 131
    paged = Paged(
        num_tokens, heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = (torch.randn(num_tokens, num_heads, head_dim) * 2).to(dtype)
    unchunked = prefill(paged, query, num_tokens, reach, cap)
    expected = torch.stack([paged.attend(q, i, reach, cap) for i, q in enumerate(query)])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(unchunked.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(decode(paged, query, torch.arange(1, 132), reach, cap), unchunked)


@pytest.mark.parametrize("reach", [None, Window(37)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [(torch.float32, 64, 16), (torch.bfloat16, 64, 16), (torch.bfloat16, 10, 4)],
)
def test_sinks_take_a_part_of_the_weights(
    dtype: torch.dtype, head_dim: int, block_size: int, reach: Reach
) -> None:
    """Near FP64, with equal bits of prefill, decode and chunks; one sink is above all scores."""
    num_tokens = SEGMENT + 50
    shape = {"heads": 2, "head_dim": head_dim, "block_size": block_size}
    paged = Paged(num_tokens, dtype=dtype, **shape)
    query = (torch.randn(num_tokens, 6, head_dim) * 2).to(dtype)
    sinks = torch.tensor([-4.0, 0.5, 4.0, 90.0, 1.0, -90.0])

    def attended(first: int, end: int) -> Tensor:
        return prefill_attention(
            query[first:end],
            paged.cache,
            paged.table.unsqueeze(0),
            torch.tensor([0, end - first]),
            torch.tensor([end]),
            head_dim**-0.5,
            lower=lower_of(reach, [end - first], [end], query.device),
            sinks=sinks,
        )

    whole = attended(0, num_tokens)
    places = [0, 1, 40, num_tokens - 1]
    expected = torch.stack([paged.attend(query[i], i, reach, None, sinks) for i in places])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(whole[places].double(), expected, rtol=tolerance, atol=tolerance)
    chunks = [attended(0, 100), attended(100, 101), attended(101, num_tokens)]
    assert torch.equal(torch.cat(chunks), whole)
    decoded = decode_attention(
        query,
        paged.cache,
        paged.table.expand(num_tokens, -1),
        torch.arange(1, num_tokens + 1),
        head_dim**-0.5,
        lower=lower_of(reach, [1] * num_tokens, range(1, num_tokens + 1), query.device),
        sinks=sinks,
    )
    assert torch.equal(decoded, whole)


@pytest.mark.parametrize("reach", [None, Window(300), Window(SEGMENT), Chunk(300)])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_bits_do_not_depend_on_chunks_across_segments(
    dtype: torch.dtype, head_dim: int, reach: Reach
) -> None:
    num_tokens = 2 * SEGMENT + 100
    paged = Paged(num_tokens, heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    query = torch.randn(num_tokens, 4, head_dim).to(dtype)
    unchunked = prefill(paged, query, num_tokens, reach, None)
    singly = decode(paged, query, torch.arange(1, num_tokens + 1), reach, None)
    assert torch.equal(singly, unchunked)
    for size in (7, 64, 500):
        cuts = range(0, num_tokens, size)
        chunks = [
            prefill(paged, query[cut : cut + size], min(cut + size, num_tokens), reach, None)
            for cut in cuts
        ]
        assert torch.equal(torch.cat(chunks), unchunked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_a_batch_are_independent(dtype: torch.dtype) -> None:
    paged = Paged(90, heads=2, head_dim=32, block_size=16, dtype=dtype)
    query = torch.randn(57, 4, 32).to(dtype)
    tables, lens = paged.table.expand(3, -1), torch.tensor([90, 33, 24])
    together = prefill_attention(
        query, paged.cache, tables, torch.tensor([0, 30, 33, 57]), lens, 32**-0.5
    )
    alone = [
        prefill(paged, query[low:high], context_len, None, None)
        for low, high, context_len in ((0, 30, 90), (30, 33, 33), (33, 57, 24))
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    paged = Paged(700, heads=2, head_dim=64, block_size=16, dtype=dtype)
    query = torch.randn(300, 4, 64).to(dtype)
    outputs = []
    for num_threads in (1, 2):
        with computing_threads(num_threads):
            outputs.append(prefill(paged, query, 700, None, None))
    assert torch.equal(*outputs)


def test_masked_lane_and_large_scores_stay_finite() -> None:
    paged = Paged(70, heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    query = torch.full((70, 1, 16), 1e4)
    out = prefill(paged, query, 70, None, None)
    assert out.isfinite().all()
    nearest = torch.stack([(paged.kv[0, : i + 1, 0].sum(-1)).argmax() for i in range(70)])
    torch.testing.assert_close(out[:, 0], paged.kv[1, nearest, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reach", [None, Window(37), Chunk(40)])
def test_bits_over_an_fp8_cache_depend_neither_on_chunks_nor_on_the_batch(reach: Reach) -> None:
    """Near FP64 of the stored numbers times their head's scale."""
    paged = Paged(131, heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    scales = torch.tensor([[0.5, 0.25], [2.0, 3.0]])
    stored = (paged.cache / scales[:, None, :, None, None]).to(torch.float8_e4m3fn)
    query = torch.randn(131, 4, 64).bfloat16()

    def attended(first: int, end: int) -> Tensor:
        return prefill_attention(
            query[first:end],
            stored,
            paged.table.unsqueeze(0),
            torch.tensor([0, end - first]),
            torch.tensor([end]),
            0.125,
            lower=lower_of(reach, [end - first], [end], query.device),
            kv_scales=scales,
        )

    unchunked, lens = attended(0, 131), torch.arange(1, 132)
    paged.kv = (paged.kv / scales[:, None, :, None]).to(stored.dtype).float()
    paged.kv *= scales[:, None, :, None]
    expected = torch.stack([paged.attend(q, i, reach, None) for i, q in enumerate(query)])
    torch.testing.assert_close(unchunked.double(), expected, rtol=8e-3, atol=8e-3)
    for size in (1, 7, 64):
        chunks = [attended(cut, min(cut + size, 131)) for cut in range(0, 131, size)]
        assert torch.equal(torch.cat(chunks), unchunked)
    lower = lower_of(reach, [1] * 131, lens.tolist(), query.device)
    tables = paged.table.expand(131, -1)
    rest = {"lower": lower, "kv_scales": scales}
    assert torch.equal(decode_attention(query, stored, tables, lens, 0.125, **rest), unchunked)
