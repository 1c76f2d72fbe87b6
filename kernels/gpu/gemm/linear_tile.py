"""The common part of GEMMs of few rows by a weight in any storage format: their tiles, the cuts
of K, and the path of the sums to y. kernels/gpu/gemm/linear.py gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, expect
from kernels.integers import cdiv, next_power_of_2
from kernels.sum_lanes import SumLanes

NUM_SEGMENTS = 4
INVARIANT_ROWS = 64
NUM_MULTIPROCESSORS = 132  # an H200 has these; other GPUs have about as many
# The stages of one program may use all of an A100 multiprocessor's memory, or half of an H200's.
SHARED_BYTES, HALF_SHARED_BYTES = 160 << 10, 112 << 10
MAX_STAGES = 6
MAX_REGISTERS = 255  # the assembler spills without this limit, to make more programs resident
GROUP_ROWS = 8  # tiles of rows that read a weight's tile at about the same time
REDUCE_BLOCK = 1024
ROW_TILES, COLUMN_TILES = (16, 32, 64, 128), (32, 64, 128)
LEAST_STEP = 64  # elements of K, for lanes that end within a longer step
LANE_BLOCK_N = 64
DENSE_STAGES = 4
NARROW_BLOCK_N, NARROW_WIDTH = 32, 8192  # a longer K is read faster in segments
MOST_SHAPES = 4096  # whose tilings are remembered: all layers have the same few, in each step


class Tiling(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_split: bool  # each of a tile's segments is computed by one program
    # programs among which a tile's lanes are divided, unless it is split: more than one has not
    # run on a device, so only the GPU kit measures it
    lane_parts: int = 1


class Plan(NamedTuple):
    """What a launch's shapes determine. `cuts` and `blocks` are the kernel's constants before and
    after its own, by position: by name, Triton would take 3 us more for them.
    """

    grid: tuple[int, int]
    num_parts: int  # programs of a tile
    is_uneven: bool
    cuts: tuple[int, ...]  # IS_CUT to GROUP
    blocks: tuple[int, int, int]
    options: dict[str, int]


def expect_matmul(x: Tensor, shape: Sequence[int], bias: Tensor | None) -> None:
    """Checks that x [M, K] and bias [N] fit a weight of `shape`. Raises BadTensor."""
    expect("x", x, (None, None), dtype=FLOATS)
    if bias is not None:
        expect("bias", bias, shape[:1], dtype=x.dtype, device=x.device)


def tiling(shape: tuple[int, int, int], dtype: torch.dtype, *, is_batch_invariant: bool) -> Tiling:
    """Few rows use narrow tiles, enough for all multiprocessors to stream weights without a second
    kernel. With more rows a tile reads more of x, from the L2 cache, and is wider to compensate.
    `shape` is [M, N, K].
    """
    return _tiling(shape, dtype, is_batch_invariant, NUM_MULTIPROCESSORS)


@lru_cache(MOST_SHAPES)
def _tiling(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    is_batch_invariant: bool,
    num_multiprocessors: int,
) -> Tiling:
    num_rows, num_columns, width = shape
    if dtype == torch.float32:  # no tensor cores: a thread's factors must fit its registers
        block_m, block_n, block_k = 16, 32, 64
    else:
        block_m = 128 if num_rows > 64 else max(16, next_power_of_2(num_rows))
        block_m = max(block_m, INVARIANT_ROWS if is_batch_invariant else 16)
        block_n = 32 if num_rows <= 16 else 128
        if num_rows <= 16 and num_columns >= 64 * 3 * num_multiprocessors:
            block_n = 64
        # a step of 16 rows is short: more of K per step means fewer barriers
        block_k = 256 if block_m <= 16 else 128
    num_tiles = cdiv(num_rows, block_m) * cdiv(num_columns, block_n)
    is_idle = num_tiles < num_multiprocessors * 3 // 4
    is_split = is_idle and width > 2 * block_k  # one program is faster for less
    num_programs = num_tiles * (NUM_SEGMENTS if is_split else 1)
    stage_bytes = (block_m + block_n) * block_k * dtype.itemsize
    is_paired = num_programs > num_multiprocessors and 3 * stage_bytes <= HALF_SHARED_BYTES
    room = HALF_SHARED_BYTES if is_paired else SHARED_BYTES
    return Tiling(
        *(block_m, block_n, block_k),
        is_split=is_split,
        num_warps=8 if block_m > 64 else 4,
        num_stages=min(MAX_STAGES, room // stage_bytes),
    )


def lane_tiling(shape: tuple[int, int, int], dtype: torch.dtype, lanes: SumLanes) -> Tiling:
    """Returns the tiling of a GEMM that sums in lanes, in the steps of every rank's part. Tiles are
    narrow: four of them, of sums that wait for their siblings, stay in the registers.
    """
    return _lane_tiling(shape, dtype, lanes, NUM_MULTIPROCESSORS)


@lru_cache(MOST_SHAPES)
def _lane_tiling(
    shape: tuple[int, int, int], dtype: torch.dtype, lanes: SumLanes, num_multiprocessors: int
) -> Tiling:
    tiled = _tiling(shape, dtype, True, num_multiprocessors)
    least = lanes.alignment & -lanes.alignment  # the power of two that divides all borders
    block_k = min(tiled.block_k, least) if least >= LEAST_STEP else tiled.block_k
    return tiled._replace(
        block_k=block_k,
        block_n=min(tiled.block_n, LANE_BLOCK_N),
        is_split=tiled.is_split or not has_even_lanes(lanes, block_k),
    )


def dense_tiling(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    is_batch_invariant: bool,
    lanes: SumLanes | None = None,
) -> Tiling:
    """Returns the tiling of a weight that is not compressed, whose tiles wait for nothing but
    memory. The order of sums is that of `tiling` or, with lanes, `lane_tiling`.

    Of many rows a step of K is short: four stages of it hide more than two of a long one. Where
    sums are in the order of segments anyhow, tiles of many rows are split only if half of the
    multiprocessors had none, and narrow tiles of few rows replace split ones, which need a second
    kernel. Measured on an H200: benchmarks/README.md.
    """
    return _dense_tiling(shape, dtype, is_batch_invariant, lanes, NUM_MULTIPROCESSORS)


@lru_cache(MOST_SHAPES)
def _dense_tiling(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    is_batch_invariant: bool,
    lanes: SumLanes | None,
    num_multiprocessors: int,
) -> Tiling:
    if lanes is None:
        tiled = _tiling(shape, dtype, is_batch_invariant, num_multiprocessors)
    else:
        tiled = _lane_tiling(shape, dtype, lanes, num_multiprocessors)
    if dtype == torch.float32:
        return tiled
    if tiled.block_m > 64:
        tiled = _of_many_rows(tiled, shape, lanes)
    if not (is_batch_invariant and tiled.is_split):
        return tiled
    if lanes is not None and not has_even_lanes(lanes, tiled.block_k):
        return tiled
    return _unsplit(tiled, shape, num_multiprocessors)


def _of_many_rows(tiled: Tiling, shape: tuple[int, int, int], lanes: SumLanes | None) -> Tiling:
    block_k = tiled.block_k
    if lanes is None and shape[2] % (NUM_SEGMENTS * block_k) == 0:  # the segments stay the same
        block_k = LEAST_STEP
    return _staged(tiled._replace(block_k=block_k))


def _staged(tiled: Tiling) -> Tiling:
    stage_bytes = (tiled.block_m + tiled.block_n) * tiled.block_k * 2
    return tiled._replace(num_stages=min(DENSE_STAGES, SHARED_BYTES // stage_bytes))


def _unsplit(tiled: Tiling, shape: tuple[int, int, int], num_multiprocessors: int) -> Tiling:
    """Returns the tiling whose tiles sum all segments, if there are enough of them."""
    num_rows, num_columns, width = shape
    is_narrow = tiled.block_m <= 64
    block_n = NARROW_BLOCK_N if is_narrow else tiled.block_n
    num_tiles = cdiv(num_rows, tiled.block_m) * cdiv(num_columns, block_n)
    if num_tiles < num_multiprocessors // 2 or (is_narrow and width > NARROW_WIDTH):
        return tiled
    num_stages = DENSE_STAGES if is_narrow else tiled.num_stages
    return tiled._replace(block_n=block_n, num_stages=num_stages, is_split=False)


@cache
def has_even_lanes(lanes: SumLanes, block_k: int) -> bool:
    """Whether all lanes have equally many full steps: one program can loop over all of them."""
    widths = {end - first for first, end in lanes.ranges}
    return len(widths) == 1 and lanes.width // lanes.num % block_k == 0


def row_counts(
    shapes: Iterable[tuple[int, int, SumLanes | None]],
    dtype: torch.dtype,
    max_rows: int,
    *,
    is_batch_invariant: bool,
) -> list[int]:
    """The least numbers of rows, up to `max_rows`, that between them need every kernel of GEMMs
    with weights of these shapes [N, K], some of which sum in lanes.
    """
    unique, counts = set(shapes), []
    seen: set[tuple[tuple[int, int, SumLanes | None], tuple[Tiling, Tiling]]] = set()

    def tiled(num_rows: int, each: tuple[int, int, SumLanes | None]) -> tuple[Tiling, Tiling]:
        """Returns the tilings of a weight that is compressed and of one that is not."""
        shape, lanes = (num_rows, *each[:2]), each[2] if is_batch_invariant else None
        dense = dense_tiling(shape, dtype, is_batch_invariant=is_batch_invariant, lanes=lanes)
        if lanes is not None:
            return lane_tiling(shape, dtype, lanes), dense
        return tiling(shape, dtype, is_batch_invariant=is_batch_invariant), dense

    for num_rows in _breakpoints({columns for columns, _, _ in unique}, max_rows):
        found = {(each, tiled(num_rows, each)) for each in unique}
        if not found <= seen:
            counts.append(num_rows)
            seen |= found
    return counts


def _breakpoints(columns: Iterable[int], max_rows: int) -> list[int]:
    """Numbers of rows at which a tiling of a weight with one of these numbers of columns can
    change: where its tile of rows does, and where its tiles reach a number that it depends on.
    """
    # Tiles with which the multiprocessors are busy, or have two programs, split or not.
    least_tiles = (
        NUM_MULTIPROCESSORS // 2,
        NUM_MULTIPROCESSORS * 3 // 4,
        NUM_MULTIPROCESSORS + 1,
        NUM_MULTIPROCESSORS // NUM_SEGMENTS + 1,
    )
    counts = {1, *(size + 1 for size in ROW_TILES)}
    for num_columns, block_m, block_n in product(columns, ROW_TILES, COLUMN_TILES):
        tiles = cdiv(num_columns, block_n)
        counts |= {(cdiv(least, tiles) - 1) * block_m + 1 for least in least_tiles}
    return sorted(count for count in counts if count <= max_rows)


def multiply(
    kernel: Any,
    tiled: Tiling,
    operands: Sequence[Tensor],
    strides: Sequence[int],
    bias: Tensor | None,
    out: Tensor,
    *,
    is_batch_invariant: bool,
    lanes: SumLanes | None = None,
    constants: Sequence[int] = (),
) -> None:
    """Fills y with the result of `kernel`'s GEMM of x, the first operand, and a weight, the others.
    A second kernel adds split segments, or lanes. For y of FP32 [L, M, N], only the lanes are
    computed. `constants` are those of this kernel alone.
    """
    num_rows, num_columns = out.shape[-2:]
    shape = num_rows, num_columns, operands[0].shape[1]
    plan = _plan(tiled, shape, lanes, is_batch_invariant)
    sums, is_added = out, plan.num_parts > 1 and out.ndim == 2
    if is_added:
        sums = out.new_empty((plan.num_parts, *out.shape), dtype=torch.float32)
    kernel[plan.grid](
        *(*operands, bias, sums, *strides, *shape),
        borders_on(lanes, out.device) if plan.is_uneven else None,
        *(bias is not None, *plan.cuts, *constants, *plan.blocks),
        **plan.options,
        enable_fp_fusion=True,
    )
    if is_added:
        _add_segments_kernel[(cdiv(out.numel(), REDUCE_BLOCK),)](
            *(sums, bias, out, num_rows, num_columns),
            HAS_BIAS=bias is not None,
            NUM=plan.num_parts,
            IS_LANED=lanes is not None,
            BLOCK=REDUCE_BLOCK,
            enable_fp_fusion=True,
        )


@lru_cache(MOST_SHAPES)
def _plan(
    tiled: Tiling, shape: tuple[int, int, int], lanes: SumLanes | None, is_batch_invariant: bool
) -> Plan:
    num_rows, num_columns, width = shape
    num_tiles = cdiv(num_rows, tiled.block_m) * cdiv(num_columns, tiled.block_n)
    num_segments = NUM_SEGMENTS if lanes is None else lanes.num
    widths = [width] if lanes is None else [end - first for first, end in lanes.ranges]
    is_uneven = lanes is not None and not has_even_lanes(lanes, tiled.block_k)
    num_parts = num_segments if tiled.is_split else tiled.lane_parts
    cuts = (
        is_batch_invariant and not tiled.is_split,
        num_parts,
        lanes is not None,
        is_uneven,
        lanes is not None and lanes.alignment % 16 == 0,
        all(each % tiled.block_k == 0 for each in widths),
        num_segments,
        GROUP_ROWS,
    )
    options = {
        "num_warps": tiled.num_warps,
        "num_stages": tiled.num_stages,
        "maxnreg": MAX_REGISTERS,
    }
    return Plan(
        grid=(num_tiles, num_parts),
        num_parts=num_parts,
        is_uneven=is_uneven,
        cuts=cuts,
        blocks=(tiled.block_m, tiled.block_n, tiled.block_k),
        options=options,
    )


@cache
def borders_on(lanes: SumLanes, device: torch.device) -> Tensor:
    """[L + 1] int32"""
    return torch.tensor(lanes.borders, dtype=torch.int32, device=device)


@triton.jit
def tile_place(
    num_rows, num_columns, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """This program's first row and first column of y."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    first_tile = tile // (GROUP * column_tiles) * GROUP
    group = min(row_tiles - first_tile, GROUP)
    within = tile % (GROUP * column_tiles)
    return (first_tile + within % group) * BLOCK_M, (within // group) * BLOCK_N


@triton.jit
def segment_steps(
    width,
    borders_ptr,
    PARTS: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """This program's first step of K, its end step, and the number of steps per segment; then the
    column of step 0, and the end of the columns that it may read.
    """
    if IS_UNEVEN:
        low = tl.load(borders_ptr + tl.program_id(1))
        high = tl.load(borders_ptr + tl.program_id(1) + 1)
        if IS_ALIGNED:  # otherwise loads would not be wide, nor asynchronous
            low, high = tl.multiple_of(low, 16), tl.multiple_of(high, 16)
        steps = tl.cdiv(high - low, BLOCK_K)
        return 0, steps, steps, low, high
    else:  # noqa: RET505  the other branch is not compiled
        num_steps = tl.cdiv(width, BLOCK_K)
        steps = tl.cdiv(num_steps, NUM)
        first = tl.program_id(1) * steps * (NUM // PARTS)
        last = min(first + steps * (NUM // PARTS), num_steps) if PARTS > 1 else num_steps
        return first, last, steps, 0, width


@triton.jit
def add_lane(acc, lane, pair, quad, half, NUM: tl.constexpr):
    """Adds a lane's sum to the tree of `NUM` lanes: sums of one, two and four that wait for their
    siblings. The total ends in the last of them that the tree has.
    """
    if lane % 2 == 0:
        pair = acc
    else:
        acc = pair + acc
        if NUM <= 2:
            pair = acc
        elif lane % 4 == 1:
            quad = acc
        else:
            acc = quad + acc
            if NUM == 4:
                quad = acc
            else:
                half = acc if lane % 8 == 3 else half + acc
    return pair, quad, half


@triton.jit
def lane_total(pair, quad, half, NUM: tl.constexpr):
    if NUM <= 2:
        return pair
    elif NUM == 4:  # noqa: RET505
        return quad
    else:
        return half


@triton.jit
def store_tile(
    acc,
    bias_ptr,
    out_ptr,
    row,
    column,
    num_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores acc [BLOCK_M, BLOCK_N] to the part's sums, or rounded and with bias to y."""
    is_inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    place = row[:, None].to(tl.int64) * num_columns + column[None, :]
    if PARTS > 1:
        place += tl.program_id(1).to(tl.int64) * num_rows * num_columns
        tl.store(out_ptr + place, acc, mask=is_inside)
    else:
        y = acc.to(out_ptr.dtype.element_ty)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
            y = (y.to(tl.float32) + bias.to(tl.float32)[None, :]).to(y.dtype)
        tl.store(out_ptr + place, y, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_segments_kernel(
    sums_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    NUM: tl.constexpr,
    IS_LANED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums [NUM, M, N] -> out [M, N], flat."""
    size = num_rows.to(tl.int64) * num_columns
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    if IS_LANED:
        pair, quad, half = total, total, total
        for lane in tl.static_range(NUM):
            found = tl.load(sums_ptr + lane * size + place, mask=is_inside, other=0.0)
            pair, quad, half = add_lane(found, lane, pair, quad, half, NUM)
        total = lane_total(pair, quad, half, NUM)
    else:
        for segment in tl.static_range(NUM):
            total += tl.load(sums_ptr + segment * size + place, mask=is_inside, other=0.0)
    y = total.to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + place % num_columns, mask=is_inside, other=0.0)
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + place, y, mask=is_inside)
