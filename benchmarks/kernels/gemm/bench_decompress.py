"""decompress, compared with a copy: 12 bits per weight are read and 16 written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.kernels.gemm.bench_compressed_linear import split
from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.gemm.decompress import decompress

SHAPES = ((4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096))


def rows(shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Row]:
    yield from (_row(n, k) for n, k in shapes)


def _row(n: int, k: int) -> Row:
    weight = split(random(n, k))
    out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.device)
    num_bytes = weight.num_bytes + out.nbytes
    return by_bandwidth(f"{n} x {k}", lambda: decompress(weight, out), num_bytes)


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"decompress: {row['case']}", row["of_copy"], 0.8, "of a copy's bandwidth")
        for row in rows
    ]
