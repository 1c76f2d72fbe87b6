"""rotate_and_store of BF16 heads: bytes over the time of a copy.

Queries, keys and values are read; queries are written, keys and values go to a cache in BF16 or
FP8. The last case is a decode step: its time is the launch's.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.kv.paged import FP8, angles, layer_cache, scales, scattered_slots
from benchmarks.kernels.timing import by_bandwidth, random
from benchmarks.report import Bar, Row, at_least
from kernels.gpu.kv.rotate_and_store import rotate_and_store

NUM_ELEMENTS = 192 << 20
DECODE = "a decode step of 64"


def rows() -> list[Row]:
    return [
        _row(32, 8, 128),
        _row(32, 8, 128, has_norm=True),
        _row(32, 8, 128, dtype=FP8),
        _row(64, 8, 128),
        _row(28, 4, 80),
        _row(8, 4, 256, has_norm=True),
        _row(32, 8, 128, num_tokens=64),
    ]


def _row(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    has_norm: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_tokens: int | None = None,
) -> Row:
    case = f"{num_heads} + 2 x {num_kv_heads} heads of {head_dim} to {dtype}"
    case += " with norms" if has_norm else ""
    if num_tokens is None:
        num_tokens = NUM_ELEMENTS // ((num_heads + 2 * num_kv_heads) * head_dim)
    else:
        case = f"{DECODE}, {case}"
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = angles(num_tokens, head_dim // 2)
    cache, slots = (
        layer_cache(num_tokens, num_kv_heads, head_dim, dtype),
        scattered_slots(num_tokens),
    )
    options: dict[str, Any] = {"kv_scales": scales(num_kv_heads) if dtype == FP8 else None}
    if has_norm:
        options |= {"query_norm": random(head_dim), "key_norm": random(head_dim), "eps": 1e-6}
    num_read = heads.nbytes + cos.nbytes + sin.nbytes + slots.nbytes
    num_queries, num_stored = num_heads * head_dim, 2 * num_kv_heads * head_dim
    num_written = num_tokens * (num_queries * heads.itemsize + num_stored * dtype.itemsize)
    return by_bandwidth(
        case,
        lambda: rotate_and_store(heads, cos, sin, cache, slots, **options),
        num_read + num_written,
    )


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"rotate_and_store: {row['case']}", row["of_copy"], 0.85, "of copy")
        for row in rows
        if not row["case"].startswith(DECODE)
    ]
