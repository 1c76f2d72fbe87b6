"""y = x · weightᵀ + bias for few rows: a dense tiled product, the measure of compressed weights.

    product[m, n] = Σ_s Σ_{k in segment s} x[m, k] · weight[n, k],   y = round(product) + bias

Both sums run in FP32. The inner one is a chain of tensor-core products over rising k; K is cut into
`NUM_SEGMENTS` segments where the tiles of y alone would leave multiprocessors idle: each segment's
sum is written out and a second kernel adds them in their order, without atomics.

Batch-invariant: K is always cut into the same segments, by one program or by several, whose sums
add up in the same order; and a tile has at least `INVARIANT_ROWS` rows, from which on Hopper
multiplies by its warp-group instruction, so that each element is the same chain of the same
instruction. How many rows and columns lie beside it in a tile is no part of that chain.

Memory-bound up to some 64 rows: the weight is read once, and its stream is the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dot import dot
from kernels.expect import expect

NUM_SEGMENTS = 4
INVARIANT_ROWS = 64
NUM_MULTIPROCESSORS = 132  # of an H200; others have about as many
# Of the stages of one program: what an A100's multiprocessor has, or half of what an H200's has.
SHARED_BYTES, HALF_SHARED_BYTES = 160 << 10, 112 << 10
MAX_STAGES = 6
MAX_REGISTERS = 255  # unless told, the assembler spills to keep more programs resident than fit
GROUP_ROWS = 8  # tiles of rows that read a weight's tile at about the same time
REDUCE_BLOCK = 1024
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tiling:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_split: bool  # a tile's segments are computed by as many programs


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """As kernels.reference.linear. Raises BadTensor."""
    num_rows, width, num_columns = len(x), x.shape[-1], len(weight)
    expect("x", x, (None, None), dtype=FLOATS)
    expect("weight", weight, (None, width), dtype=x.dtype, device=x.device)
    if bias is not None:
        expect("bias", bias, (num_columns,), dtype=x.dtype, device=x.device)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    shape = (num_rows, num_columns, width)
    tiling = _tiling(shape, x.dtype, is_batch_invariant=is_batch_invariant)
    is_split = tiling.is_split
    num_steps = triton.cdiv(width, tiling.block_k)
    sums = (
        torch.empty((NUM_SEGMENTS, num_rows, num_columns), dtype=torch.float32, device=x.device)
        if is_split
        else out
    )
    num_tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(num_columns, tiling.block_n)
    _linear_kernel[(num_tiles, NUM_SEGMENTS if is_split else 1)](
        *(x, weight, bias, sums),
        *(x.stride(0), weight.stride(0)),
        *(num_rows, num_columns, width, triton.cdiv(num_steps, NUM_SEGMENTS)),
        HAS_BIAS=bias is not None,
        IS_CUT=is_batch_invariant and not is_split,
        IS_SPLIT=is_split,
        IS_EVEN_K=width % tiling.block_k == 0,
        GROUP=GROUP_ROWS,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=MAX_REGISTERS,
    )
    if is_split:
        _add_segments_kernel[(triton.cdiv(out.numel(), REDUCE_BLOCK),)](
            *(sums, bias, out),
            *(out.numel(), num_columns),
            HAS_BIAS=bias is not None,
            NUM=NUM_SEGMENTS,
            BLOCK=REDUCE_BLOCK,
        )
    return out


def _tiling(shape: tuple[int, int, int], dtype: torch.dtype, *, is_batch_invariant: bool) -> Tiling:
    """Few rows get narrow tiles, enough for all multiprocessors to stream weights with no second
    kernel. With more rows a tile reads more of x, from the L2 cache, and is wider to make up for
    it.
    """
    num_rows, num_columns, width = shape
    if dtype == torch.float32:  # no tensor cores: what a thread multiplies must fit its registers
        block_m, block_n, block_k = 16, 32, 64
    else:
        block_m = 128 if num_rows > 64 else max(16, triton.next_power_of_2(num_rows))
        block_m = max(block_m, INVARIANT_ROWS if is_batch_invariant else 16)
        block_n = 32 if num_rows <= 16 else 128
        if num_rows <= 16 and num_columns >= 64 * 3 * NUM_MULTIPROCESSORS:
            block_n = 64
        # a step of 16 rows is short: more of K, so that fewer of its barriers are waited for
        block_k = 256 if block_m <= 16 else 128
    num_tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, block_n)
    is_idle = num_tiles < NUM_MULTIPROCESSORS * 3 // 4
    is_split = is_idle and width > 2 * block_k  # less is done sooner by one program
    num_programs = num_tiles * (NUM_SEGMENTS if is_split else 1)
    stage_bytes = (block_m + block_n) * block_k * dtype.itemsize
    is_paired = num_programs > NUM_MULTIPROCESSORS and 3 * stage_bytes <= HALF_SHARED_BYTES
    room = HALF_SHARED_BYTES if is_paired else SHARED_BYTES
    return Tiling(
        *(block_m, block_n, block_k),
        is_split=is_split,
        num_warps=8 if block_m > 64 else 4,
        num_stages=min(MAX_STAGES, room // stage_bytes),
    )


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x_row,
    stride_weight_row,
    num_rows,
    num_columns,
    width,
    segment_steps,
    HAS_BIAS: tl.constexpr,
    IS_CUT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = tl.program_id(1)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    first_tile = tile // (GROUP * column_tiles) * GROUP
    group = min(row_tiles - first_tile, GROUP)
    within = tile % (GROUP * column_tiles)
    row = (first_tile + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // group) * BLOCK_N + tl.arange(0, BLOCK_N)
    step_k = tl.arange(0, BLOCK_K)
    is_row = row[:, None] < num_rows  # [BLOCK_M, 1]
    x_row_ptr = x_ptr + row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    # columns beyond the last are computed from the first, and not stored
    weight_row = (column % num_columns)[:, None].to(tl.int64)  # [BLOCK_N, 1]
    weight_row_ptr = weight_ptr + weight_row * stride_weight_row

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = segment * segment_steps
    num_steps = tl.cdiv(width, BLOCK_K)
    last = min(first + segment_steps, num_steps) if IS_SPLIT else num_steps
    for step in range(first, last):
        k = (step * BLOCK_K + step_k)[None, :]  # [1, BLOCK_K]
        if IS_EVEN_K:
            x = tl.load(x_row_ptr + k, mask=is_row, other=0.0)
            weight = tl.load(weight_row_ptr + k)
        else:
            x = tl.load(x_row_ptr + k, mask=is_row & (k < width), other=0.0)
            weight = tl.load(weight_row_ptr + k, mask=k < width, other=0.0)
        acc = dot(x, tl.trans(weight), acc)  # [BLOCK_M, BLOCK_N]
        if IS_CUT:  # noqa: SIM102  one is decided at compile time, one at run time
            if (step + 1) % segment_steps == 0:
                total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IS_CUT:
        acc = total + acc

    is_inside = is_row & (column[None, :] < num_columns)
    place = row[:, None].to(tl.int64) * num_columns + column[None, :]
    if IS_SPLIT:
        place += segment * num_rows * num_columns
        tl.store(out_ptr + place, acc, mask=is_inside)
    else:
        y = acc.to(out_ptr.dtype.element_ty)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
            y = (y.to(tl.float32) + bias.to(tl.float32)[None, :]).to(y.dtype)
        tl.store(out_ptr + place, y, mask=is_inside)


@triton.jit
def _add_segments_kernel(
    sums_ptr,
    bias_ptr,
    out_ptr,
    size,
    num_columns,
    HAS_BIAS: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums [NUM, M, N] -> out [M, N], flat. As few elements as are split fit 32 bits."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(NUM):
        total += tl.load(sums_ptr + segment * size + place, mask=is_inside, other=0.0)
    y = total.to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + place % num_columns, mask=is_inside, other=0.0)
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + place, y, mask=is_inside)
