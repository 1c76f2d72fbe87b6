"""prefill_attention, heads of Llama-3.1-70B: FLOP/s over torch's best SDPA backend, same run.

Both count the products of unmasked token pairs. SDPA gets dense keys and values, repeated for every
query head; Hearth reads the paged cache. SDPA's prompt is the full one in every case.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.attention.contexts import HEAD_DIM, NUM_HEADS, SCALE, batch
from benchmarks.kernels.timing import random, seconds
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.attention.prefill_attention import prefill_attention

CONTEXT_LEN = 8192
WHOLE, PREFIX = "8k causal", "4k behind a paged prefix of 4k"
BARS = {WHOLE: 0.9, PREFIX: 0.8}
INVARIANT = ", invariant"
SLOWEST_INVARIANT = 1 / 1.15  # of the speed without invariance
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


def rows() -> list[Row]:
    found = [_sdpa(backend) for backend in BACKENDS]
    for case, query_len in ((WHOLE, CONTEXT_LEN), (PREFIX, CONTEXT_LEN // 2)):
        found += [_row(case, query_len, False), _row(case + INVARIANT, query_len, True)]
    best = max(row["tflop_s"] for row in found[: len(BACKENDS)])
    return [row | {"of_sdpa": round(row["tflop_s"] / best, 3)} for row in found]


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


def _row(case: str, query_len: int, is_batch_invariant: bool) -> Row:
    paged = batch(1, CONTEXT_LEN)
    query = random(query_len, NUM_HEADS, HEAD_DIM)
    starts = torch.tensor([0, query_len], device="cuda", dtype=torch.int32)

    def launch() -> None:
        prefill_attention(
            *(query, paged.cache, paged.tables, starts, paged.context_lens, SCALE),
            is_batch_invariant=is_batch_invariant,
        )

    return _rate(case, seconds(launch), query_len)


def _rate(case: str, took_s: float, query_len: int) -> Row:
    pairs = query_len * (CONTEXT_LEN - query_len) + query_len * (query_len + 1) // 2
    rate = 4 * pairs * NUM_HEADS * HEAD_DIM / took_s
    return {"case": case, "ms": round(took_s * 1e3, 3), "tflop_s": round(rate / 1e12, 1)}


def bars(rows: list[Row]) -> list[Bar]:
    by_case = {row["case"]: row for row in rows}
    found = [
        at_least(f"prefill_attention: {case}", by_case[case]["of_sdpa"], bar, "of SDPA")
        for case, bar in BARS.items()
    ]
    return found + [
        at_least(
            f"prefill_attention: {case}{INVARIANT}",
            by_case[case]["ms"] / by_case[case + INVARIANT]["ms"],
            SLOWEST_INVARIANT,
            "of the free one",
        )
        for case in BARS
    ]
