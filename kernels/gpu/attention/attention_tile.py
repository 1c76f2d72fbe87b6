"""Online softmax over tiles of paged keys and values: the common part of prefill and decode.

    score = q · k · scale        or softcap · tanh(q · k · scale / softcap)
    out   = Σ 2^(score · log2 e - top) · v / Σ 2^(score · log2 e - top)
`top` is the largest score so far, in units of log2; all sums are FP32 (Milakov and Gimelshein,
Online normalizer calculation for softmax, 2018). Tiles start at fixed multiples of BLOCK_N. A tile
that is masked for a row changes none of its bits, and multiply-adds are fused only where explicit,
so that the same tiles give the same bits in every kernel (launch with `enable_fp_fusion=False`).

Latents: values are the first VALUE_DIM elements of their keys, which are loaded once for both. The
other elements, the tail, are multiplied apart, so that neither tile is padded to the power of two
above their sum.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device as devices
from kernels.check_tensor import FLOATS, INDICES, BadTensor, expect
from kernels.gpu.gemm.tile_dot import dot
from kernels.integers import next_power_of_2

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 1024  # at most 512 of them are values
SEGMENT = 1024  # tokens summed separately if bits must not depend on chunks and splits
MOST_LATENT_HEADS = 64  # limit of a tile

# Rows and columns of sums that leave no registers for the addresses of a tensor core's operands,
# one for each 16 columns: loops over such tiles compute them again instead of retaining them.
LARGE_SUMS = tl.constexpr((64, 256))

LOG2_E = tl.constexpr(1.4426950408889634)


def expect_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    kv_scales: Tensor | None,
    lower: Tensor | None,
    sinks: Tensor | None,
    value_dim: int | None,
) -> None:
    """Checks the common arguments of both wrappers. Raises BadTensor, ValueError."""
    device = query.device
    expect("query", query, (None, None, None), dtype=FLOATS)
    num_heads, head_dim = query.shape[1:]
    planes = (2, None, None) if value_dim is None else (1, None, 1)
    expect(
        *("kv_cache", kv_cache, (*planes, None, head_dim)),
        dtype=(query.dtype, torch.float8_e4m3fn),
        device=device,
    )
    if not kv_cache.is_contiguous():
        expect("kv_cache[0]", kv_cache[0], kv_cache.shape[1:], is_contiguous=True)
    _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    expect("context_lens", context_lens, (None,), dtype=INDICES, device=device, is_contiguous=True)
    num_seqs = context_lens.shape[0]
    expect("block_tables", block_tables, (num_seqs, None), dtype=INDICES, device=device)
    if kv_scales is not None:
        expect(
            *("kv_scales", kv_scales, (2, num_kv_heads)),
            dtype=torch.float32,
            device=device,
            is_contiguous=True,
        )
    if lower is not None:
        expect(
            *("lower", lower, query.shape[:1]),
            dtype=torch.int32,
            device=device,
            is_contiguous=True,
        )
    if sinks is not None:
        expect(
            *("sinks", sinks, (num_heads,)),
            dtype=torch.float32,
            device=device,
            is_contiguous=True,
        )
    if not num_kv_heads or num_heads % num_kv_heads:
        raise BadTensor(f"query has {num_heads} heads for {num_kv_heads} KV heads")
    _expect_dims(head_dim, value_dim)
    if num_blocks * num_kv_heads * block_size >= 2**31:
        raise BadTensor(f"kv_cache of {list(kv_cache.shape)} has more rows than 32 bits can count")
    if scale <= 0:
        raise ValueError(f"scale is {scale}, not positive")


def _expect_dims(head_dim: int, value_dim: int | None) -> None:
    most = MAX_HEAD_DIM if value_dim is None else MAX_LATENT_DIM
    if head_dim > most:
        raise BadTensor(f"query has head_dim {head_dim}, more than {most}")
    if value_dim is None:
        return
    if not 0 < value_dim <= min(head_dim, MAX_LATENT_DIM // 2):
        raise BadTensor(f"values of {value_dim} elements in keys of {head_dim}")


def block_n(
    head_dim: int, dtype: torch.dtype, device: torch.device, is_batch_invariant: bool
) -> int:
    """Returns the tokens of a tile, bounded by memory (three stages plus a query) and registers.

    Before Hopper, keys and values take registers, too.
    """
    if devices.compute_capability(device) >= 90:
        most, key_bytes = 64, 16384
    else:
        most, key_bytes = 32, 4096 if is_batch_invariant else 8192
    return max(16, min(most, key_bytes // dtype.itemsize // padded(head_dim)))


@cache
def heads_per_tile(group: int, value_dim: int | None) -> tuple[int, int]:
    """Returns how many of the `group` query heads of a KV head a tile holds, and the number of
    tiles. A tile of 128 heads over latents would exceed a multiprocessor's shared memory.
    """
    most = group if value_dim is None else MOST_LATENT_HEADS
    tiles = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= most)
    return group // tiles, tiles


def padded(head_dim: int) -> int:
    """Returns the columns of a tile."""
    return max(16, next_power_of_2(head_dim))


class Columns(NamedTuple):
    """How a kernel reads rows of `head_dim` elements: the first `value_dim`, and then a tail. These
    are the kernel's first constants.
    """

    head_dim: int
    value_dim: int
    block_d: int
    block_tail: int
    is_latent: bool


@cache
def columns_of(head_dim: int, value_dim: int | None) -> Columns:
    width = head_dim if value_dim is None else value_dim
    return Columns(
        head_dim=head_dim,
        value_dim=width,
        block_d=padded(width),
        block_tail=padded(head_dim - width) if head_dim > width else 0,
        is_latent=value_dim is not None,
    )


@triton.jit
def load_tail(
    query_ptr,
    offset,  # [BLOCK_M]
    is_inside,  # [BLOCK_M, BLOCK_D]
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """The tails of queries [BLOCK_M, BLOCK_TAIL]."""
    column = VALUE_DIM + tl.arange(0, BLOCK_TAIL)[None, :]
    is_row = tl.max(is_inside.to(tl.int32), axis=1) > 0
    is_read = is_row[:, None] & (column < HEAD_DIM)
    return tl.load(query_ptr + (offset[:, None] + column), mask=is_read, other=0.0)


@triton.jit
def scales(scale, softcap, kv_scales_ptr, head, num_kv_heads):
    """The factor from q·k to a score in log2, or to the argument of tanh; the scale of values."""
    key_scale = scale
    value_scale = 1.0
    if kv_scales_ptr is not None:
        key_scale = scale * tl.load(kv_scales_ptr + head)
        value_scale = tl.load(kv_scales_ptr + num_kv_heads + head)
    if softcap is not None:
        score_scale = key_scale / softcap
    else:
        score_scale = key_scale * LOG2_E
    return score_scale, value_scale


@triton.jit
def attend(
    q,  # [BLOCK_M, BLOCK_D]
    tail,  # [BLOCK_M, BLOCK_TAIL], if keys have one
    position,  # [BLOCK_M]: a row attends to tokens up to its own
    span,  # [lowest, stop) is visible; [first_full, end_full), full tiles, is visible to each row
    paged,  # one KV head and sequence: key_ptr, value_ptr or None, table_ptr, rows per block
    scoring,  # score_scale, softcap, lower: [BLOCK_M], or None
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """top [BLOCK_M], total [BLOCK_M] and acc [BLOCK_M, BLOCK_D] of a span of tokens.

    `lowest` is a multiple of BLOCK_N, unless there are lower bounds.
    """
    lowest, first_full, end_full, stop = span
    readable = (lowest, stop)
    first = lowest // BLOCK_N * BLOCK_N
    end = tl.cdiv(stop, BLOCK_N) * BLOCK_N
    if paged[1] is None:
        running = _attend_latents(
            *(q, tail, position, first, end, readable, paged, scoring),
            *(HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N),
        )
    else:
        first_full = tl.maximum(first, tl.minimum(first_full, end))
        end_full = tl.maximum(first_full, tl.minimum(end_full, end))
        running = _no_tokens(q)
        if scoring[2] is not None:
            running = _attend_tiles(
                *(q, position, running, first, first_full, readable, paged, scoring),
                *(HEAD_DIM, BLOCK_SIZE, BLOCK_N, True),
            )
        running = _attend_tiles(
            *(q, position, running, first_full, end_full, readable, paged, scoring),
            *(HEAD_DIM, BLOCK_SIZE, BLOCK_N, False),
        )
        running = _attend_tiles(
            *(q, position, running, end_full, end, readable, paged, scoring),
            *(HEAD_DIM, BLOCK_SIZE, BLOCK_N, True),
        )
    return running


@triton.jit
def _no_tokens(q):
    """The state of rows before the first tile."""
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    return top, total, tl.zeros((q.shape[0], q.shape[1]), tl.float32)


@triton.jit
def _attend_tiles(
    q,
    position,
    running,
    first,  # a multiple of BLOCK_N
    end,
    readable,
    paged,
    scoring,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # else every row attends to every token of the tiles
):
    """Adds the tiles of [first, end) to the state `running`.

    Block ids are read one tile early, so that address computations do not wait. Weights stay within
    their iteration: a tensor core reads them from registers after the instruction is issued, and
    those of a loop's variable are overwritten meanwhile.
    """
    top, total, acc = running
    key_ptr, value_ptr, _, block_rows = paged
    column = tl.arange(0, q.shape[1])[None, :]  # [1, BLOCK_D]
    last_seen = tl.minimum(position, readable[1] - 1)  # [BLOCK_M]
    block = _block_ids(first, end, readable, paged, BLOCK_SIZE, BLOCK_N)
    IS_LARGE: tl.constexpr = q.shape[0] >= LARGE_SUMS[0] and q.shape[1] >= LARGE_SUMS[1]
    for start in tl.range(first, end, BLOCK_N, disable_licm=IS_LARGE):
        next_block = _block_ids(start + BLOCK_N, end, readable, paged, BLOCK_SIZE, BLOCK_N)
        token = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        row = block * block_rows + token % BLOCK_SIZE  # [BLOCK_N]
        block = next_block
        key = _load_rows(key_ptr, row, start, column, readable, HEAD_DIM, HEAD_DIM, IS_MASKED)
        value = _load_rows(value_ptr, row, start, column, readable, HEAD_DIM, HEAD_DIM, IS_MASKED)
        score = dot(q, tl.trans(key.to(q.dtype)), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        top, total, kept, grown = _weights(
            *(score, token, last_seen, top, total, scoring, IS_MASKED),
        )
        acc = dot(grown.to(q.dtype), value.to(q.dtype), acc * kept[:, None])
    return top, total, acc


@triton.jit
def _attend_latents(
    q,
    tail,
    position,
    first,  # a multiple of BLOCK_N
    end,
    readable,
    paged,
    scoring,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The same for values that are parts of their keys: all tiles are masked. What a second loop
    needs would take registers of the sums, which have most of them.
    """
    top, total, acc = _no_tokens(q)
    key_ptr, _, _, block_rows = paged
    column = tl.arange(0, q.shape[1])[None, :]  # [1, BLOCK_D]
    last_seen = tl.minimum(position, readable[1] - 1)  # [BLOCK_M]
    block = _block_ids(first, end, readable, paged, BLOCK_SIZE, BLOCK_N)
    IS_LARGE: tl.constexpr = q.shape[0] >= LARGE_SUMS[0] and q.shape[1] >= LARGE_SUMS[1]
    for start in tl.range(first, end, BLOCK_N, disable_licm=IS_LARGE):
        next_block = _block_ids(start + BLOCK_N, end, readable, paged, BLOCK_SIZE, BLOCK_N)
        token = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile's rows are adjacent
            first_row = (block * block_rows + start % BLOCK_SIZE).to(tl.int64)
            tile_ptr = key_ptr + first_row * HEAD_DIM
            row = tl.arange(0, BLOCK_N)  # [BLOCK_N]
        else:
            tile_ptr = key_ptr
            row = block * block_rows + token % BLOCK_SIZE  # [BLOCK_N]
        key = _load_rows(tile_ptr, row, start, column, readable, HEAD_DIM, VALUE_DIM, True)
        block = next_block
        score = dot(q, tl.trans(key.to(q.dtype)), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if HEAD_DIM > VALUE_DIM:
            rest = VALUE_DIM + tl.arange(0, tail.shape[1])[None, :]
            more = _load_rows(tile_ptr, row, start, rest, readable, HEAD_DIM, HEAD_DIM, True)
            score = dot(tail, tl.trans(more.to(q.dtype)), score)
        top, total, kept, grown = _weights(
            *(score, token, last_seen, top, total, scoring, True),
        )
        acc = dot(grown.to(q.dtype), key.to(q.dtype), acc * kept[:, None])
    return top, total, acc


@triton.jit
def _weights(score, token, last_seen, top, total, scoring, IS_MASKED: tl.constexpr):
    """top and total [BLOCK_M] with a tile, the factor of earlier sums, the weights of the tile."""
    score_scale, softcap, lower = scoring
    factor = score_scale
    if softcap is not None:
        score = _capped(score * score_scale, softcap)
        factor = 1.0
    if IS_MASKED:
        is_seen = token[None, :] <= last_seen[:, None]  # [BLOCK_M, BLOCK_N]
        if lower is not None:
            is_seen &= token[None, :] >= lower[:, None]
        score = tl.where(is_seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1) * factor)  # [BLOCK_M]
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no visible token so far
    grown = tl.exp2(tl.fma(score, factor, -finite[:, None]))  # [BLOCK_M, BLOCK_N]
    kept = tl.exp2(top - finite)
    return higher, tl.fma(total, kept, tl.sum(grown, axis=1)), kept, grown


@triton.jit
def _block_ids(start, end, readable, paged, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] block ids of the tile at `start`, if it is before `end`; of latents one, if blocks
    consist of tiles.
    """
    lowest, stop = readable
    if BLOCK_SIZE % BLOCK_N == 0 and paged[1] is None:
        token = start
        is_read = (start + BLOCK_N > lowest) & (start < tl.minimum(stop, end))
    else:
        token = start + tl.arange(0, BLOCK_N)
        is_read = (token >= lowest) & (token < tl.minimum(stop, end))
    return tl.load(paged[2] + token // BLOCK_SIZE, mask=is_read, other=0).to(tl.int32)


@triton.jit
def _load_rows(
    ptr,
    row,  # [BLOCK_N]
    start,
    column,  # [1, BLOCK_D]
    readable,
    HEAD_DIM: tl.constexpr,
    END: tl.constexpr,  # columns of a row that are read
    IS_MASKED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of the tile at `start`; zero outside `readable`."""
    lowest, stop = readable
    at = ptr + (row.to(tl.int64) * HEAD_DIM)[:, None] + column
    if IS_MASKED:
        token = start + tl.arange(0, row.shape[0])[:, None]
        is_read = (token >= lowest) & (token < stop) & (column < END)
        rows = tl.load(at, mask=is_read, other=0.0)
    elif column.shape[1] != END:
        rows = tl.load(at, mask=column < END, other=0.0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
def _capped(x, softcap):
    """softcap · tanh(x) · log2 e; tanh(x) = 1 - 2 / (1 + e^2x)"""
    grown = tl.exp2(x * (2.0 * LOG2_E))
    return (softcap * LOG2_E) * (1.0 - 2.0 / (1.0 + grown))


@triton.jit
def merge(state, more):
    """Merges two states."""
    top, total, acc = state
    more_top, more_total, more_acc = more
    higher = tl.maximum(top, more_top)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - finite)
    added = tl.exp2(more_top - finite)
    total = tl.fma(more_total, added, total * kept)
    acc = tl.fma(more_acc, added[:, None], acc * kept[:, None])
    return higher, total, acc


@triton.jit
def with_sinks(state, sinks_ptr, head):
    """Adds the scores of keys whose values are zero. `head` [rows]: the head of each row.

    Once a row, after all its tokens: where a context was cut changes no bit.
    """
    top, total, acc = state
    sink = tl.load(sinks_ptr + head) * LOG2_E
    higher = tl.maximum(top, sink)
    kept = tl.exp2(top - higher)  # 0 for a row without visible tokens
    return higher, tl.fma(total, kept, tl.exp2(sink - higher)), acc * kept[:, None]


@triton.jit
def normalized(total, acc, value_scale):
    """Divides by the total; a row without visible tokens is zero."""
    return acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
