"""apply_token_mask: in place, for 64 rows of 128k, by the share of tokens that the masks allow.

A mask is read once, and -inf written for each token that it forbids; allowed logits are neither
read nor written. A mask that forbids few tokens costs only the launch and its own bits: that row
has no bar.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.sampling.apply_token_mask import apply_token_mask

NUM_ROWS, VOCAB_SIZE = 64, 128_256
FEW = 100  # tokens


def rows() -> list[Row]:
    return [_row("few allowed", FEW / VOCAB_SIZE), _row("few forbidden", 1 - FEW / VOCAB_SIZE)]


def _row(case: str, share: float) -> Row:
    logits = random(NUM_ROWS, VOCAB_SIZE).float()
    allowed = torch.rand(NUM_ROWS, VOCAB_SIZE // 32, 32, device="cuda") < share
    bits = torch.arange(32, device="cuda")
    words = (allowed.long() << bits).sum(-1).to(torch.int32)
    num_forbidden = allowed.numel() - int(allowed.sum())
    every_row = torch.arange(NUM_ROWS, device="cuda")
    return by_bandwidth(
        f"{NUM_ROWS} rows, {case}",
        lambda: apply_token_mask(logits, every_row, words),
        words.numel() * 4 + num_forbidden * 4,
    )


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"apply_token_mask: {row['case']}", row["of_copy"], 0.5, "of copy")
        for row in rows
        if row["case"].endswith("few allowed")
    ]
