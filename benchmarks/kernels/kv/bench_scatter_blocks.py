"""scatter_blocks in BF16 and FP8: bytes over the time of a copy. Each byte is read and
written; the checksum is computed in the same pass.
"""

from __future__ import annotations

from benchmarks.kernels.kv.wire import CASES, Run
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.kv.scatter_blocks import scatter_blocks


def rows() -> list[Row]:
    return [Run.of(case).row(scatter_blocks) for case in CASES]


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"scatter_blocks: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows
    ]
