"""sample for a batch of 64 and a vocabulary of 128k, FP32 logits, by enabled options.

Logits have two distributions: `peaked`, like a language model's (a few tokens have most of the
weight), and `flat`, normal ones, of which top-p includes tens of thousands. Top-p alone on flat
ones is shown without a bar: one program per row checks its sample against all tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.timing import random, seconds
from benchmarks.report import Bar, Row, at_most
from kernels.gpu.sampling.sample import sample
from kernels.torch_ops.sample import sample as reference_sample

NUM_ROWS, VOCAB_SIZE = 64, 128_256
MOST_US = 100.0
ALL = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
CASES: list[tuple[str, str, dict[str, float], bool]] = [
    ("all and a mask", "peaked", ALL, True),
    ("all and a mask", "flat", ALL, True),
    ("all", "peaked", ALL, False),
    ("temperature", "peaked", {}, False),
    ("greedy", "peaked", {"temperature": 0.0}, False),
    ("top-p", "peaked", {"top_p": 0.9}, False),
    ("top-p", "flat", {"top_p": 0.9}, False),
]


def rows() -> list[Row]:
    return [_row(*case) for case in CASES]


def _row(name: str, shape: str, options: dict[str, float], has_mask: bool) -> Row:
    logits = random(NUM_ROWS, VOCAB_SIZE).float()
    if shape == "peaked":  # Zipf's law, in a random order per row
        logits = -1.5 * logits.argsort(-1).add(1).float().log()
    columns = _columns(**options)
    mask = _mask() if has_mask else None
    return {
        "case": f"{name}, {shape}",
        "us": round(seconds(lambda: sample(logits, *columns, mask)) * 1e6, 1),
        "torch_us": round(seconds(lambda: reference_sample(logits, *columns, mask)) * 1e6, 1),
        "has_bar": name.startswith("all") or shape == "peaked",
    }


def _columns(
    temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[torch.Tensor]:
    floats, integers = torch.float32, torch.int64

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((NUM_ROWS,), value, dtype=dtype, device="cuda")

    return [
        column(temperature, floats),
        column(int(top_k), integers),
        column(top_p, floats),
        column(min_p, floats),
        torch.arange(NUM_ROWS, device="cuda"),
        column(0, integers),
        column(7, integers),
    ]


def _mask() -> torch.Tensor:
    """A random half of the tokens."""
    shape = (NUM_ROWS, VOCAB_SIZE // 32)
    return torch.randint(-(2**31), 2**31, shape, device="cuda").to(torch.int32)


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_most(f"sample: {row['case']}", row["us"], MOST_US, "µs")
        for row in rows
        if row["has_bar"]
    ]
