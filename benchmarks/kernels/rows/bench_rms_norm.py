"""rms_norm in BF16: bytes over the time of a copy. A row is read and written."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.rows.rms_norm import rms_norm

SHAPES = ((32_768, 4096), (16_384, 8192), (1_048_576, 128))  # the last: norms of heads


def rows(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Row]:
    found = []
    for num_rows, hidden in shapes:
        x, weight = random(num_rows, hidden), random(hidden)
        found.append(
            by_bandwidth(
                f"{num_rows} x {hidden}",
                lambda: rms_norm(x, weight, 1e-5),  # noqa: B023
                2 * x.nbytes,
            )
        )
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [at_least(f"rms_norm: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows]
