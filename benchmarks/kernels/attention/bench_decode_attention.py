"""decode_attention, heads of Llama-3.1-70B: bytes of keys and values read, over a copy's bandwidth.

In batch-invariant mode the cuts of a context are fixed and do not depend on the batch.
The batch of unequal lengths has one long context and many short ones.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.attention.contexts import HEAD_DIM, NUM_HEADS, SCALE, Batch, batch
from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.attention.decode_attention import decode_attention

BARS = {"64 x 8k": 0.85, "1 x 128k": 0.8}
INVARIANT = ", invariant"
SLOWEST_INVARIANT = 1 / 1.15  # of the speed without invariance


def rows() -> list[Row]:
    found = _rows("64 x 8k", batch(64, 8192)) + _rows("1 x 128k", batch(1, 131_072))
    unlike = batch(64, 32_768)
    unlike.context_lens[1:] = 1024
    found += _rows("1 x 32k, 63 x 1k", unlike)
    scales = torch.ones((2, unlike.cache.shape[2]), device="cuda")
    return found + _rows(
        "64 x 8k, FP8", batch(64, 8192, torch.float8_e4m3fn), {"kv_scales": scales}
    )


def _rows(case: str, paged: Batch, options: dict[str, Any] | None = None) -> list[Row]:
    query = random(len(paged.tables), NUM_HEADS, HEAD_DIM)
    token_bytes = 2 * paged.cache[0, 0, :, 0].numel() * paged.cache.element_size()
    num_bytes = int(paged.context_lens.sum()) * token_bytes

    def launch(is_batch_invariant: bool) -> None:
        decode_attention(
            *(query, paged.cache, paged.tables, paged.context_lens, SCALE),
            is_batch_invariant=is_batch_invariant,
            **(options or {}),
        )

    return [
        by_bandwidth(case, lambda: launch(False), num_bytes),
        by_bandwidth(case + INVARIANT, lambda: launch(True), num_bytes),
    ]


def bars(rows: list[Row]) -> list[Bar]:
    by_case = {row["case"]: row for row in rows}
    found = [
        at_least(f"decode_attention: {case}", by_case[case]["of_copy"], bar, "of copy")
        for case, bar in BARS.items()
    ]
    return found + [
        at_least(
            f"decode_attention: {case}{INVARIANT}",
            by_case[case]["us"] / by_case[case + INVARIANT]["us"],
            SLOWEST_INVARIANT,
            "of the free one",
        )
        for case in BARS
    ]
