"""linear compared with the library in BF16, at the shapes of Llama-3.1-8B, and with a copy.

With few rows the weight's bytes are the cost, so `of_copy` is the weight's size over the time of a
copy that reads and writes as much. `invariant_of_free` is the cost of the fixed order. 2,048 rows
are shown although the library is faster there: the kernel is not designed for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.timing import by_bandwidth, random, seconds
from benchmarks.report import Bar, Row, at_least, at_most
from kernels.gpu.gemm.linear import linear

SHAPES = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096))
NUM_ROWS = (1, 8, 64)
MANY_ROWS = 2048


def rows() -> Iterator[Row]:
    yield from (_row(m, n, k) for n, k in SHAPES for m in NUM_ROWS)
    yield _row(MANY_ROWS, 4096, 4096)


def _row(m: int, n: int, k: int) -> Row:
    x, weight = random(m, k), random(n, k)
    case = f"{m} x {k} x {n}"
    row = by_bandwidth(case, lambda: linear(x, weight), weight.numel() * weight.element_size())
    library_s = seconds(lambda: torch.nn.functional.linear(x, weight))
    invariant_s = seconds(lambda: linear(x, weight, is_batch_invariant=True))
    return {
        **row,
        "library_us": round(library_s * 1e6, 1),
        "invariant_us": round(invariant_s * 1e6, 1),
        "of_library": round(library_s * 1e6 / row["us"], 3),
        "invariant_of_free": round(invariant_s * 1e6 / row["us"], 3),
    }


def bars(rows: list[Row]) -> list[Bar]:
    few = [row for row in rows if not row["case"].startswith(str(MANY_ROWS))]
    return [
        at_least(f"linear: {row['case']}", row["of_library"], 0.95, "of the library") for row in few
    ] + [
        at_most(f"linear, invariant: {row['case']}", row["invariant_of_free"], 1.15, "of the free")
        for row in few
    ]
