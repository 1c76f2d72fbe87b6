"""store_kv of BF16 keys and values: bytes over the time of a plain copy.

They are read, and written to a cache in BF16 (as many bytes) or FP8 (half as many).
"""

from __future__ import annotations

import torch

from benchmarks.kernels.paged import FP8, layer_cache, scales, scattered_slots
from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.kv.store_kv import store_kv

SHAPES = ((8, 128), (4, 256), (8, 80))  # KV heads, head_dim
NUM_ELEMENTS = 128 << 20  # of keys and of values


def rows() -> list[Row]:
    found = []
    for num_kv_heads, head_dim in SHAPES:
        num_tokens = NUM_ELEMENTS // (num_kv_heads * head_dim)
        key, value = (random(num_tokens, num_kv_heads, head_dim) for _ in range(2))
        slots = scattered_slots(num_tokens)
        for dtype in (torch.bfloat16, FP8):
            cache = layer_cache(num_tokens, num_kv_heads, head_dim, dtype)
            kv_scales = scales(num_kv_heads) if dtype == FP8 else None
            found.append(
                by_bandwidth(
                    f"{num_tokens} x {num_kv_heads} x {head_dim} to {dtype}",
                    lambda: store_kv(key, value, cache, slots, kv_scales=kv_scales),  # noqa: B023
                    2 * key.nbytes + 2 * key.numel() * dtype.itemsize + slots.nbytes,
                )
            )
    return found


def bars(rows: list[Row]) -> list[Bar]:
    return [at_least(f"store_kv: {row['case']}", row["of_copy"], 0.85, "of copy") for row in rows]
