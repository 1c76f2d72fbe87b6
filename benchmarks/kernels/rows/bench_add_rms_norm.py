"""add_rms_norm in BF16: bytes over the time of a copy. Two rows are read and two written."""

from __future__ import annotations

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.rows.add_rms_norm import add_rms_norm

SHAPES = ((32_768, 4096), (16_384, 8192))


def rows() -> list[Row]:
    found = []
    for num_rows, hidden in SHAPES:
        x, residual, weight = random(num_rows, hidden), random(num_rows, hidden), random(hidden)
        found.append(
            by_bandwidth(
                f"{num_rows} x {hidden}",
                lambda: add_rms_norm(x, residual, weight, 1e-5),  # noqa: B023
                4 * x.nbytes,
            )
        )
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"add_rms_norm: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows
    ]
