"""A product with a weight's split form, beside that with its dense one."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_kit.bit_checks.sizes import sizes_of
from benchmarks.gpu_kit.bit_checks.verdict import Verdict
from benchmarks.gpu_kit.operands import products

KERNELS = ("compressed_linear", "linear", "lane_linear")


def compare(verdict: Verdict) -> None:
    for product in ("qkv", "gate_up"):
        _compare_segments(verdict, product)
    for product in ("o", "down"):
        _compare_lanes(verdict, product)


def _compare_segments(verdict: Verdict, product: str) -> None:
    from kernels.gpu.gemm.compressed_linear import compressed_linear
    from kernels.gpu.gemm.linear import linear

    sizes = sizes_of(verdict.session)
    exact: dict[str, Any] = {"is_batch_invariant": True}
    x, weight = products.operands(verdict.session, product, sizes.many_rows)
    split = products.split_of(verdict.session, weight)
    for num_rows in (*sizes.num_rows, sizes.many_rows):
        rows = x[:num_rows]
        found, wanted = compressed_linear(rows, split, **exact), linear(rows, weight, **exact)
        verdict.compare(f"split {product}, {num_rows} rows", found, wanted, KERNELS)


def _compare_lanes(verdict: Verdict, product: str) -> None:
    from kernels.gpu.gemm.compressed_linear import compressed_linear, fits_lanes
    from kernels.gpu.gemm.lane_linear import lane_linear

    session, lanes = verdict.session, products.lanes_of(verdict.session, product)
    if not fits_lanes(lanes):  # the engine decompresses such a weight
        return
    x, weight = products.operands(session, product, sizes_of(session).many_rows)
    split = products.split_of(session, weight)
    for num_rows in sizes_of(session).num_rows:
        rows = x[:num_rows]
        found = compressed_linear(rows, split, lanes=lanes)
        wanted = lane_linear(rows, weight, lanes=lanes)
        verdict.compare(f"split {product}, {num_rows} rows", found, wanted, KERNELS)
