"""Times kernels on the GPU, and measures the limits they are compared with.

Times are medians of many launches, each with a cold L2 cache (`triton.testing.do_bench` clears it).
Inputs are random: a GPU runs faster on zeros. The bandwidth of a copy counts bytes read and bytes
written. Without a GPU, in a dry run, everything is launched once and every figure is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.testing import do_bench

from benchmarks.report import Bar, Row

Found = tuple[Row, list[Bar]]  # a measurement, and the targets that it must meet

COPY_BYTES = 2 << 30
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(launch: Callable[[], object]) -> float:
    if DEVICE.type == "cpu":
        launch()
        return math.nan
    median: Any = do_bench(launch, warmup=50, rep=200, return_mode="median")
    return float(median) / 1e3


@cache
def copy_bandwidth() -> float:
    """Returns the bytes/s of a device-to-device copy, the upper limit of everything that
    only moves bytes.
    """
    if DEVICE.type == "cpu":
        return math.nan
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def by_bandwidth(case: str, launch: Callable[[], object], num_bytes: int) -> Row:
    """Returns a row: `num_bytes` is the minimum that must be read and written."""
    took_s = seconds(launch)
    rate = num_bytes / took_s
    return {
        "case": case,
        "us": round(took_s * 1e6, 1),
        "gb_s": round(rate / 1e9, 1),
        "of_copy": round(rate / copy_bandwidth(), 3),
    }
