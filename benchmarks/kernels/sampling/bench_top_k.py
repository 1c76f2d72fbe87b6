"""likeliest: the 20 largest of 128k for 64 rows, FP32, compared with torch.topk of the same keys.

x is read once; taking 20 keys sequentially is the cost, not the bytes: `of_copy` shows it.
"""

from __future__ import annotations

from benchmarks.kernels.timing import by_bandwidth, random, seconds
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.sampling.top_k import top_k
from kernels.torch_ops.top_k import top_k as reference_top_k

VOCAB_SIZE = 128_256


def rows() -> list[Row]:
    return [_row(num_rows, k) for num_rows in (1, 64) for k in (1, 20)]


def _row(num_rows: int, k: int) -> Row:
    x = random(num_rows, VOCAB_SIZE).float()
    row = by_bandwidth(f"{k} of {num_rows} x {VOCAB_SIZE}", lambda: top_k(x, k), x.nbytes)
    by_topk_s = seconds(lambda: reference_top_k(x, k))
    return {**row, "of_topk": round(by_topk_s * 1e6 / row["us"], 2)}


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"likeliest: {row['case']}", row["of_topk"], 1.0, "of torch.topk") for row in rows
    ]
