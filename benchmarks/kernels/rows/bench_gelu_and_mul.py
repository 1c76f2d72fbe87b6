"""gelu_and_mul in BF16: bytes over the time of a copy. Two rows are read, one is written."""

from __future__ import annotations

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.rows.gelu_and_mul import gelu_and_mul

WIDTHS = (14_336, 28_672, 1376)  # Llama 3's 8B and 70B; the last: 11,008 on eight GPUs
NUM_ELEMENTS = 128 << 20  # of gate and of up


def rows() -> list[Row]:
    found = []
    for width in WIDTHS:
        num_tokens = NUM_ELEMENTS // width
        gate_up = random(num_tokens, 2 * width)
        found.append(
            by_bandwidth(
                f"{num_tokens} x {width}",
                lambda: gelu_and_mul(gate_up),  # noqa: B023
                gate_up.nbytes * 3 // 2,
            )
        )
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"gelu_and_mul: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows
    ]
