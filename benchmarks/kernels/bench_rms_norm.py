"""rms_norm, alone and with the residual sum, in BF16: bytes over the time of a plain copy.

Norm: a row is read and written. With the sum: two rows are read and two written.
"""

from __future__ import annotations

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.rms_norm import add_rms_norm, rms_norm

SHAPES = ((32_768, 4096), (16_384, 8192), (262_144, 128))  # the last: norms of heads


def rows() -> list[Row]:
    found = []
    for num_rows, hidden in SHAPES:
        x, residual, weight = random(num_rows, hidden), random(num_rows, hidden), random(hidden)
        size = x.numel() * x.element_size()
        shape = f"{num_rows} x {hidden}"
        found += [
            by_bandwidth(f"norm {shape}", lambda: rms_norm(x, weight, 1e-5), 2 * size),  # noqa: B023
            by_bandwidth(
                f"add, norm {shape}",
                lambda: add_rms_norm(x, residual, weight, 1e-5),  # noqa: B023
                4 * size,
            ),
        ]
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [at_least(f"rms_norm: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows]
