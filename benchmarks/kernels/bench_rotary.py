"""rotary in BF16: bytes over the time of a plain copy.

Heads are read and written, and a token's cosines and sines are read once.
"""

from __future__ import annotations

from benchmarks.kernels.paged import angles
from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.kv.rotary import rotary

SHAPES = ((32, 128, 128), (8, 128, 128), (32, 80, 32), (8, 256, 256))  # heads, head, rotary dim
NUM_ELEMENTS = 128 << 20


def rows() -> list[Row]:
    found = []
    for num_heads, head_dim, rotary_dim in SHAPES:
        num_tokens = NUM_ELEMENTS // (num_heads * head_dim)
        x = random(num_tokens, num_heads, head_dim)
        cos, sin = angles(num_tokens, rotary_dim // 2)
        found.append(
            by_bandwidth(
                f"{num_tokens} x {num_heads} x {head_dim}, {rotary_dim} turned",
                lambda: rotary(x, cos, sin),  # noqa: B023
                2 * x.nbytes + cos.nbytes + sin.nbytes,
            )
        )
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [at_least(f"rotary: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows]
