"""penalize: sparse and in place, for 64 sequences with 1,000 or 8,000 distinct tokens each.

An entry is 24 bytes that are read in order, and a logit that is read and written at a random place:
32 bytes each way, the minimum transfer. Few entries cost only the launch; that row has no bar.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.sampling.penalize import penalize

NUM_ROWS, VOCAB_SIZE = 64, 128_256
BYTES = 24 + 2 * 32
MANY = 8000


def rows() -> list[Row]:
    return [_row(1000), _row(MANY)]


def _row(num_tokens: int) -> Row:
    logits = random(NUM_ROWS, VOCAB_SIZE).float()
    ids = (
        torch.rand(NUM_ROWS, VOCAB_SIZE, device="cuda").argsort(-1)[:, :num_tokens].sort(-1).values
    )
    of_row = torch.arange(NUM_ROWS, device="cuda").repeat_interleave(num_tokens)
    repetition = torch.full_like(of_row, 1.1, dtype=torch.float32)
    subtracted = torch.full_like(of_row, 0.1, dtype=torch.float32)
    return by_bandwidth(
        f"{NUM_ROWS} x {num_tokens} tokens",
        lambda: penalize(logits, of_row, ids.flatten(), repetition, subtracted),
        of_row.numel() * BYTES,
    )


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"penalize: {row['case']}", row["of_copy"], 0.5, "of copy")
        for row in rows
        if f"x {MANY} " in row["case"]
    ]
