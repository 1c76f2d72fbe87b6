"""Attention with the heads of Llama 3.1 70B: decode over a copy, prefill over torch's best SDPA.

Decode counts the bytes of keys and values that are read. Prefill counts the operations of unmasked
token pairs: SDPA gets dense keys and values, repeated for every query head, and the full prompt in
every case; Hearth reads the paged cache. In batch-invariant mode the cuts of a context are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.paged import BF16, BLOCK_SIZE, FP8
from benchmarks.kernels.timing import Found, by_bandwidth, random, seconds
from benchmarks.report import Row, at_least
from kernels.gpu.attention.decode_attention import decode_attention as decode_kernel
from kernels.gpu.attention.prefill_attention import prefill_attention as prefill_kernel

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 128
SCALE = HEAD_DIM**-0.5
CONTEXT_LEN = 8192
INVARIANT = ", invariant"
SLOWEST_INVARIANT = 1 / 1.15  # share of the speed without invariance
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


@dataclass(frozen=True)
class Batch:
    """The contexts of a batch, in blocks of random order."""

    cache: Tensor
    tables: Tensor
    context_lens: Tensor

    @classmethod
    def of(cls, num_seqs: int, context_len: int, dtype: torch.dtype = BF16) -> Batch:
        num_blocks = context_len // BLOCK_SIZE
        shape = (num_seqs * num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        cache = torch.stack([random(*shape, dtype=dtype), random(*shape, dtype=dtype)])
        order = torch.randperm(num_seqs * num_blocks, device="cuda", dtype=torch.int32)
        lens = torch.full((num_seqs,), context_len, device="cuda", dtype=torch.int32)
        return cls(cache, order.view(num_seqs, num_blocks), lens)


def decode_attention() -> Iterator[Found]:
    """One batch has a long context and many short ones."""
    yield from _decoded("64 x 8k", Batch.of(64, 8192), least=0.85)
    yield from _decoded("1 x 128k", Batch.of(1, 131_072), least=0.8)
    uneven = Batch.of(64, 32_768)
    uneven.context_lens[1:] = 1024
    yield from _decoded("1 x 32k, 63 x 1k", uneven)
    scales = torch.ones((2, NUM_KV_HEADS), device="cuda")
    yield from _decoded("64 x 8k, FP8", Batch.of(64, 8192, FP8), kv_scales=scales)


def _decoded(
    case: str, batch: Batch, *, least: float | None = None, **options: Any
) -> Iterator[Found]:
    query = random(len(batch.tables), NUM_HEADS, HEAD_DIM)
    token_bytes = 2 * batch.cache[0, 0, :, 0].numel() * batch.cache.element_size()
    num_bytes = int(batch.context_lens.sum()) * token_bytes
    given = query, batch.cache, batch.tables, batch.context_lens, SCALE

    def row(case: str, is_batch_invariant: bool) -> Row:
        options["is_batch_invariant"] = is_batch_invariant
        return by_bandwidth(case, lambda: decode_kernel(*given, **options), num_bytes)

    free, invariant = row(case, False), row(case + INVARIANT, True)
    if least is None:
        yield from ((free, []), (invariant, []))
        return
    yield free, [at_least(f"decode_attention: {case}", free["of_copy"], least, "of copy")]
    yield invariant, [_of_free("decode_attention", invariant["case"], free["us"], invariant["us"])]


def prefill_attention() -> Iterator[Found]:
    torchs = [_sdpa(backend) for backend in BACKENDS]
    best = max(row["tflop_s"] for row in torchs)

    def beside(row: Row) -> Row:
        return row | {"of_sdpa": round(row["tflop_s"] / best, 3)}

    yield from ((beside(row), []) for row in torchs)
    cases = (
        ("8k causal", CONTEXT_LEN, 0.9),
        ("4k behind a paged prefix of 4k", CONTEXT_LEN // 2, 0.8),
    )
    for case, query_len, least in cases:
        free = beside(_prefilled(case, query_len, False))
        yield free, [at_least(f"prefill_attention: {case}", free["of_sdpa"], least, "of SDPA")]
        row = beside(_prefilled(case + INVARIANT, query_len, True))
        yield row, [_of_free("prefill_attention", row["case"], free["ms"], row["ms"])]


def _of_free(op: str, case: str, free: float, invariant: float) -> Any:
    return at_least(f"{op}: {case}", free / invariant, SLOWEST_INVARIANT, "of the free one")


def _sdpa(backend: SDPBackend) -> Row:
    """A backend that does not support the shapes has a rate of 0."""
    query, key, value = (random(1, NUM_HEADS, CONTEXT_LEN, HEAD_DIM) for _ in range(3))

    def launch() -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)

    case = f"torch, {backend.name.lower()}"
    try:
        launch()
    except RuntimeError:
        return {"case": case, "ms": None, "tflop_s": 0.0}
    return _rate(case, seconds(launch), CONTEXT_LEN)


def _prefilled(case: str, query_len: int, is_batch_invariant: bool) -> Row:
    batch, query = Batch.of(1, CONTEXT_LEN), random(query_len, NUM_HEADS, HEAD_DIM)
    starts = torch.tensor([0, query_len], device="cuda", dtype=torch.int32)
    given = query, batch.cache, batch.tables, starts, batch.context_lens, SCALE
    launch = lambda: prefill_kernel(*given, is_batch_invariant=is_batch_invariant)  # noqa: E731
    return _rate(case, seconds(launch), query_len)


def _rate(case: str, took_s: float, query_len: int) -> Row:
    pairs = query_len * (CONTEXT_LEN - query_len) + query_len * (query_len + 1) // 2
    rate = 4 * pairs * NUM_HEADS * HEAD_DIM / took_s
    return {"case": case, "ms": round(took_s * 1e3, 3), "tflop_s": round(rate / 1e12, 1)}
