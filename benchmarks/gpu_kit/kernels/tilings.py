"""GEMMs with other tiles than the engine's: what a shape of the tile costs, by kinds of sums.

chain   one sum over K, as in the fast mode
cut     K in four segments, as in the exact mode
lanes   K in eight lanes, as o and down in the exact mode

The tensor cores' shapes give equal bits (`mma_bits`), so the exact mode may take any of these tiles
whose steps end at its borders. The library's product stands beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_kit.failures import recorded
from benchmarks.gpu_kit.operands import products
from benchmarks.gpu_kit.session import Session
from kernels.gpu.gemm.linear import launch
from kernels.gpu.gemm.linear_tile import Tiling, dense_tiling
from kernels.sum_lanes import SumLanes

LEAST_S = 1.0  # a case with less time is left out
NUM_ROWS = (8192, 256, 64)
# Rows, columns, step, warps, stages
LARGE = (
    *((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 5), (128, 128, 64, 4, 3)),
    *((128, 256, 64, 8, 3), (256, 128, 64, 8, 3)),
)
SMALL = (
    *((64, 32, 128, 4, 4), (64, 32, 128, 4, 6), (64, 64, 128, 4, 3), (64, 64, 64, 4, 6)),
    *((64, 128, 64, 4, 4), (64, 128, 128, 4, 3)),
)
LANED = ((128, 64, 128, 8, 3), (64, 64, 64, 4, 4), (64, 128, 64, 8, 4), (128, 128, 64, 8, 4))
IN_PARTS = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4))
LANED_SMALL = ((64, 32, 128, 4, 4), (64, 32, 128, 4, 6), (64, 64, 64, 4, 6))


def run(session: Session) -> None:
    failed: list[str] = []
    for product in ("gate_up", "down", "qkv", "o"):
        shape = products.weight_shape(session, product)
        weight = session.random(*shape, scale=products.WEIGHT_SCALE, seed=1)
        lanes = products.lanes_of(session, product) if product in ("o", "down") else None
        for num_rows in NUM_ROWS:
            if session.mode == "dry":
                num_rows = 1 + num_rows // 64
            x = session.random(num_rows, shape[1])
            with recorded(session, f"{product}, {num_rows} rows", failed):
                _measure(session, product, x, weight, lanes)


def _measure(
    session: Session, product: str, x: Tensor, weight: Tensor, lanes: SumLanes | None
) -> None:
    """A row for each kind of sums, with milliseconds by tile."""
    if session.left_s < LEAST_S:
        return
    shape = len(x), len(weight), x.shape[1]
    out = session.empty(len(x), len(weight))
    own = dense_tiling(shape, x.dtype, is_batch_invariant=True)
    tiles = [_tile(*each) for each in (LARGE if len(x) > 64 else SMALL)]
    kinds: dict[str, tuple[list[Tiling], SumLanes | None]] = {
        "chain": ([dense_tiling(shape, x.dtype, is_batch_invariant=False), *tiles], None)
    }
    if lanes is None:
        kinds["cut"] = [own, *tiles], None
    else:
        narrow = [_tile(*each) for each in (LANED if len(x) > 64 else LANED_SMALL)]
        own = dense_tiling(shape, x.dtype, is_batch_invariant=True, lanes=lanes)
        in_parts = [
            _tile(*each)._replace(lane_parts=parts)
            for each in (IN_PARTS if len(x) > 64 else ())
            for parts in (2, 4)
        ]
        kinds["lanes"] = [own, *narrow, *in_parts], lanes
    library = session.seconds(lambda: torch.nn.functional.linear(x, weight), 5)
    for kind, (chosen, own_lanes) in kinds.items():
        found = {}
        for tiled in chosen:
            took = session.seconds(
                lambda: launch(
                    *(x, weight, None, tiled, out),  # noqa: B023
                    is_batch_invariant=kind != "chain",  # noqa: B023
                    lanes=own_lanes,  # noqa: B023
                ),
                5,
            )
            parts = "" if tiled.lane_parts == 1 else f" in {tiled.lane_parts}"
            name = "x".join(map(str, tiled[:5])) + (" split" if tiled.is_split else parts)
            found[name] = None if took is None else round(took * 1e3, 4)
        ms = {} if library is None else {"library_ms": round(library * 1e3, 4), "ms": found}
        session.add(case=f"{product}, {len(x)} rows, {kind}", **ms)


def _tile(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Tiling:
    return Tiling(block_m, block_n, block_k, num_warps, num_stages, is_split=False)
