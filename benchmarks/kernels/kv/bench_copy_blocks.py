"""copy_blocks of Llama 3.1 8B's cache in BF16: bytes over the time of a copy.

A block is read and written. The first cases, forks of a few sequences, are dominated by the launch.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.kv.copy_blocks import copy_blocks

NUM_COPIES = (1, 8, 128, 512)
LARGE_BYTES = 256 << 20


def rows() -> list[Row]:
    cache = random(32, 2, 1024, 8, 16, 128)
    found = []
    for num_copies in NUM_COPIES:
        sources, destinations = torch.randperm(1024, device="cuda")[: 2 * num_copies].view(2, -1)
        num_bytes = 2 * cache.nbytes // 1024 * num_copies
        row = by_bandwidth(
            f"{num_copies} blocks",
            lambda: copy_blocks(cache, sources, destinations),  # noqa: B023
            num_bytes,
        )
        found.append({**row, "mib": num_bytes >> 20})
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"copy_blocks: {row['case']}", row["of_copy"], 0.85, "of copy")
        for row in rows
        if row["mib"] << 20 >= LARGE_BYTES
    ]
