"""Sampling and the largest logits, 128k FP32 logits a row, beside torch.

Logits have two distributions: `peaked`, like a language model's (a few tokens have most of the
weight), and `flat`, normal ones, of which top-p includes tens of thousands. Top-p alone on flat
ones is shown without a bar: one program per row checks its sample against all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import Found, by_bandwidth, random, seconds
from benchmarks.report import Row, at_least, at_most
from kernels.gpu.sampling.sample import sample as sample_kernel
from kernels.gpu.sampling.top_k import top_k as top_k_kernel
from kernels.torch_ops.sample import sample as torch_sample
from kernels.torch_ops.top_k import top_k as torch_top_k

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


def sample() -> Iterator[Found]:
    for name, shape, options, has_mask in CASES:
        row = _sampled(name, shape, options, has_mask)
        has_bar = name.startswith("all") or shape == "peaked"
        bar = at_most(f"sample: {row['case']}", row["us"], MOST_US, "µs")
        yield row, [bar] if has_bar else []


def _sampled(name: str, shape: str, options: dict[str, float], has_mask: bool) -> Row:
    logits = random(NUM_ROWS, VOCAB_SIZE).float()
    if shape == "peaked":  # Zipf's law, in a random order per row
        logits = -1.5 * logits.argsort(-1).add(1).float().log()
    columns = _columns(**options)
    mask = _mask() if has_mask else None
    return {
        "case": f"{name}, {shape}",
        "us": round(seconds(lambda: sample_kernel(logits, *columns, mask=mask)) * 1e6, 1),
        "torch_us": round(seconds(lambda: torch_sample(logits, *columns, mask=mask)) * 1e6, 1),
    }


def _columns(
    temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[Tensor]:
    floats, integers = torch.float32, torch.int64

    def column(value: Any, dtype: torch.dtype) -> Tensor:
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


def _mask() -> Tensor:
    """Returns a random half of the tokens."""
    shape = (NUM_ROWS, VOCAB_SIZE // 32)
    return torch.randint(-(2**31), 2**31, shape, device="cuda").to(torch.int32)


def top_k() -> Iterator[Found]:
    """x is read once; taking keys one after the other is the cost: `of_copy` shows it."""
    for num_rows in (1, NUM_ROWS):
        for k in (1, 20):
            x = random(num_rows, VOCAB_SIZE).float()
            case = f"{k} of {num_rows} x {VOCAB_SIZE}"
            row = by_bandwidth(case, lambda: top_k_kernel(x, k), x.nbytes)  # noqa: B023
            by_torch_s = seconds(lambda: torch_top_k(x, k))  # noqa: B023
            row |= {"of_topk": round(by_torch_s * 1e6 / row["us"], 2)}
            yield row, [at_least(f"top_k: {case}", row["of_topk"], 1.0, "of torch.topk")]
