"""Whether the shape of a tensor-core instruction changes the bits of an element.

The same product is computed with tiles of several shapes, for which Triton selects wgmma
instructions of 16, 32, 64, ... columns, or mma.sync for few rows; each chain runs over rising k.
Swapped tiles have the operands in each other's place. A shape with equal bits may replace another
in the exact mode.
"""

# ruff: noqa: N803  a kernel's constants

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_kit.failures import recorded
from benchmarks.gpu_kit.session import Session

SIZE, WIDTH = 256, 4096  # the result is [SIZE, SIZE], its sums have WIDTH terms


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    step: int = 64  # elements of K
    num_warps: int = 4
    is_swapped: bool = False

    def __str__(self) -> str:
        kind = "swapped tile" if self.is_swapped else "tile"
        return f"{kind} {self.rows} x {self.columns} x {self.step}, {self.num_warps} warps"


FIRST = Tile(64, 64)  # the tile of the exact mode's GEMMs
TILES = (
    FIRST,
    *(Tile(64, columns) for columns in (16, 32, 128)),
    *(Tile(64, columns, is_swapped=True) for columns in (16, 32, 64)),
    *(Tile(64, 64, step) for step in (16, 128)),
    Tile(128, 128, num_warps=8),
    Tile(16, 64),  # mma.sync
)


def run(session: Session) -> None:
    a, b = (session.random(SIZE, WIDTH, seed=seed) for seed in (0, 1))
    found: dict[str, bool] = {}
    wanted, _ = product(session, a, b, FIRST)
    for tile in TILES:
        with recorded(session, str(tile), []):
            out, instruction = product(session, a, b, tile)
            if session.is_dry:
                continue
            found[str(tile)] = torch.equal(out, wanted)
            session.add(case=str(tile), instruction=instruction, is_equal=found[str(tile)])
    session.add(case="equal bits", wanted=str(FIRST), **_verdict(found))
    if not session.is_dry:
        session.digest(str(FIRST), wanted)


def _verdict(found: dict[str, bool]) -> dict[str, list[str]]:
    return {
        "equal": [tile for tile, is_equal in found.items() if is_equal],
        "unequal": [tile for tile, is_equal in found.items() if not is_equal],
    }


def product(session: Session, a: Tensor, b: Tensor, tile: Tile) -> tuple[Tensor, str | None]:
    """Returns a · bᵀ in FP32, and the instruction's shape, None if unknown."""
    out = session.empty(SIZE, SIZE, dtype=torch.float32)
    first, second = (b, a) if tile.is_swapped else (a, b)
    compiled = _product_kernel[(SIZE // tile.rows, SIZE // tile.columns)](
        first,
        second,
        out,
        SIZE=SIZE,
        WIDTH=WIDTH,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.step,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    instruction = None if session.is_dry else _instruction(compiled)
    return out.T if tile.is_swapped else out, instruction


def _instruction(compiled: Any) -> str | None:
    """None for a packed kernel, as the pack has no intermediate form to read it in."""
    code = getattr(compiled, "asm", {}).get("ttgir", "")
    shape = re.search(r"instrShape = \[([\d, ]+)\]", str(code))
    return shape[1] if shape else None


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        a = tl.load(a_ptr + row[:, None] * WIDTH + start + step)
        b = tl.load(b_ptr + column[:, None] * WIDTH + start + step)
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(out_ptr + row[:, None] * SIZE + column[None, :], acc)
