"""Samples one token per row, like kernels.torch_ops.sample: temperature, top-k, top-p, min-p and
Gumbel-max.

Nothing is sorted. With q = (max - logit) / temperature, which is 0 for the likeliest token, a token
may be sampled if q <= -log(min_p), if fewer than top_k tokens have a lower q, and if those with a
lower q have less than top_p of the weight within top-k, each exp(-q). The sample is the first token
in the order of noisy logits that meets this, so no limit is computed beyond testing that token.

    piece   one program per piece of a row: its largest logit, its sum of weights, and the largest
            logit of each group of 64
    bound   one per row: from the groups' maxima a q that no sampled token exceeds: k groups have k
            tokens, and enough groups' largest tokens have top_p of the weight
    gather  one per piece: lists the tokens within, or without such a bound samples the piece's
            token from all
    sample    one per row: samples from the list, or from all, until the token meets all limits

A list helps if few tokens may be sampled; if many may, the first sample is most likely valid.
Each row is computed by a fixed order of operations that depends only on the row. Logits are read
twice; greedy rows, once. Sums round differently from the reference's, so if top-p ends within a
rounding error of a token's edge, the two may differ by that token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import BadTensor, expect
from kernels.gpu.sampling.sample_draw import sample_draw_kernel
from kernels.gpu.sampling.sample_noise import noise_key
from kernels.gpu.sampling.sample_scores import (
    INFINITY,
    LARGEST,
    distance,
    load_logits,
    min_p_bound,
    noisy,
)
from kernels.integers import cdiv, next_power_of_2

PIECE = 4096
GROUP = 64
CAPACITY = 128  # length of a piece's list: if it is exceeded, the row is sampled from all tokens
BLOCK = 4096  # tokens of the program that samples
SAMPLE_REGISTERS = 128  # the limit for 16 warps; otherwise the assembler spills to use fewer
SLACK = 1.0 + 2.0**-13  # factor of the sums of a bound, in addition to their rounding errors


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice_index: Tensor,
    output_position: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Computes kernels.torch_ops.sample with Triton. Raises BadTensor."""
    num_rows, vocab_size = _checked(logits, mask)
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    integers = {
        "top_k": top_k,
        "seed": seed,
        "choice_index": choice_index,
        "output_position": output_position,
    }
    for columns, dtype in ((floats, torch.float32), (integers, torch.int64)):
        for name, column in columns.items():
            expect(name, column, (num_rows,), dtype=dtype, device=logits.device, is_contiguous=True)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    piece = min(PIECE, max(GROUP, next_power_of_2(vocab_size)))
    num_pieces = cdiv(vocab_size, piece)
    num_groups = piece // GROUP

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    f32, i32 = torch.float32, torch.int32
    piece_top, piece_weight = scratch(f32, num_pieces), scratch(f32, num_pieces)
    piece_token, piece_count = scratch(i32, num_pieces), scratch(i32, num_pieces)
    group_top = scratch(f32, num_pieces * num_groups)
    list_q = scratch(f32, num_pieces * CAPACITY)
    list_token = scratch(i32, num_pieces * CAPACITY)

    source = (logits, mask, logits.stride(0), 0 if mask is None else mask.stride(0), vocab_size)
    options = (temperature, top_k, top_p, min_p)
    rows = (scratch(f32), scratch(f32), scratch(f32), scratch(i32))
    top, _, bound, key = rows
    pieces = (piece_top, piece_token, piece_weight, piece_count)
    _piece_kernel[(num_pieces, num_rows)](
        *source,
        *(temperature, top_k, top_p),
        *(*pieces, group_top),
        HAS_MASK=mask is not None,
        GROUPS=num_groups,
        GROUP=GROUP,
        num_warps=8,
        enable_fp_fusion=True,
    )
    _bound_kernel[(num_rows,)](
        *(*options, seed, choice_index, output_position),
        *(*pieces, group_top),
        *(tokens, *rows),
        *(vocab_size, num_pieces, num_pieces * num_groups),
        MOST_LISTED=num_pieces * CAPACITY // 4,
        SLACK=SLACK,
        BLOCK_PIECES=next_power_of_2(num_pieces),
        BLOCK_GROUPS=next_power_of_2(num_pieces * num_groups),
        num_warps=8,
        enable_fp_fusion=True,
    )
    _gather_kernel[(num_pieces, num_rows)](
        *source,
        *(temperature, min_p),
        *(top, bound, key),
        *(piece_top, piece_token, piece_count, list_q, list_token),
        HAS_MASK=mask is not None,
        PIECE=piece,
        CAPACITY=CAPACITY,
        num_warps=8,
        enable_fp_fusion=True,
    )
    sample_draw_kernel[(num_rows,)](
        *source,
        *options,
        *rows,
        *(piece_top, piece_token, piece_count, list_q, list_token),
        *(tokens, num_pieces),
        HAS_MASK=mask is not None,
        CAPACITY=CAPACITY,
        BLOCK_PIECES=next_power_of_2(num_pieces),
        BLOCK=min(BLOCK, next_power_of_2(vocab_size)),
        num_warps=16,
        maxnreg=SAMPLE_REGISTERS,
        enable_fp_fusion=True,
    )
    return tokens


def _checked(logits: Tensor, mask: Tensor | None) -> tuple[int, int]:
    expect("logits", logits, (None, None), dtype=torch.float32)
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size < 1 << 30:
        raise BadTensor(f"logits has shape {list(logits.shape)}, not [any, 1 to 2**30 - 1]")
    if mask is not None:
        num_words = cdiv(vocab_size, 32)
        expect("mask", mask, (num_rows, num_words), dtype=torch.int32, device=logits.device)
    return num_rows, vocab_size


@triton.jit
def _piece_kernel(
    logits_ptr,
    mask_ptr,
    stride_logits_row,
    stride_mask_row,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    piece_top_ptr,
    piece_token_ptr,
    piece_weight_ptr,
    piece_count_ptr,
    group_top_ptr,
    HAS_MASK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits_ptr += row * stride_logits_row
    if HAS_MASK:
        mask_ptr += row * stride_mask_row
    group = piece * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    x = load_logits(logits_ptr, mask_ptr, vocab_size, token, HAS_MASK)
    group_top = tl.max(x, axis=1)  # [GROUPS]
    top = tl.max(group_top, axis=0)
    first = tl.min(tl.min(tl.where(x == top, token, vocab_size), axis=1), axis=0)
    place = row * tl.num_programs(0) + piece
    tl.store(piece_top_ptr + place, top)
    tl.store(piece_token_ptr + place, first)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        weight = tl.exp(-distance(x, top, temperature))
        tl.store(piece_weight_ptr + place, tl.sum(tl.sum(weight, axis=1), axis=0))
        if (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1):
            is_possible = (x > -INFINITY).to(tl.int32)
            tl.store(piece_count_ptr + place, tl.sum(tl.sum(is_possible, axis=1), axis=0))
            tl.store(group_top_ptr + row * tl.num_programs(0) * GROUPS + group, group_top)


@triton.jit
def _bound_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    choice_index_ptr,
    output_position_ptr,
    piece_top_ptr,
    piece_token_ptr,
    piece_weight_ptr,
    piece_count_ptr,
    group_top_ptr,
    tokens_ptr,
    top_ptr,
    weight_ptr,
    bound_ptr,
    key_ptr,
    vocab_size,
    num_pieces,
    num_groups,
    MOST_LISTED: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """tokens: the greedy ones. A negative bound means that there is none."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK_PIECES)
    is_piece = piece < num_pieces
    place = row * num_pieces + piece  # [BLOCK_PIECES]
    piece_top = tl.load(piece_top_ptr + place, mask=is_piece, other=-INFINITY)
    piece_token = tl.load(piece_token_ptr + place, mask=is_piece, other=vocab_size)
    top = tl.max(piece_top, axis=0)
    first = tl.min(tl.where(piece_top == top, piece_token, vocab_size), axis=0)
    tl.store(tokens_ptr + row, tl.minimum(first, vocab_size - 1).to(tl.int64))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        weights = tl.load(piece_weight_ptr + place, mask=is_piece, other=0.0)
        weights *= tl.exp(-distance(piece_top, top, temperature))
        weight = tl.sum(weights, axis=0)
        tl.store(top_ptr + row, top)
        tl.store(weight_ptr + row, weight)
        key = noise_key(seed_ptr, choice_index_ptr, output_position_ptr, row)
        tl.store(key_ptr + row, key.to(tl.int32, bitcast=True))
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        bound = -1.0
        if has_top_k | (top_p < 1):
            group = tl.arange(0, BLOCK_GROUPS)
            group_top = tl.load(
                group_top_ptr + row * num_groups + group, mask=group < num_groups, other=-INFINITY
            )
            q = distance(group_top, top, temperature)  # [BLOCK_GROUPS]
            # a group counts as one token, its largest
            worth = tl.where(has_top_k, tl.where(q < INFINITY, 1.0, 0.0), tl.exp(-q))
            least = tl.where(has_top_k, top_k.to(tl.float32), top_p * weight * SLACK)
            count = tl.load(piece_count_ptr + place, mask=is_piece, other=0)
            if tl.sum(worth, axis=0) >= least:
                low, high = tl.full((), 0, tl.int32), tl.full((), LARGEST, tl.int32)
                while low < high:
                    middle = low + (high - low) // 2
                    is_near = q <= middle.to(tl.float32, bitcast=True)
                    is_enough = tl.sum(tl.where(is_near, worth, 0.0), axis=0) >= least
                    low = tl.where(is_enough, low, middle + 1)
                    high = tl.where(is_enough, middle, high)
                bound = low.to(tl.float32, bitcast=True)
            elif tl.sum(count, axis=0) <= MOST_LISTED:
                bound = tl.full((), LARGEST, tl.int32).to(tl.float32, bitcast=True)
            # min-p, unless top-p applies to the tokens within top-k
            of_min_p = min_p_bound(min_p_ptr, row)
            if (of_min_p < INFINITY) & ((top_p >= 1) | (has_top_k == 0)):
                bound = tl.where(bound < 0, of_min_p, tl.minimum(bound, of_min_p))
        tl.store(bound_ptr + row, bound)


@triton.jit
def _gather_kernel(
    logits_ptr,
    mask_ptr,
    stride_logits_row,
    stride_mask_row,
    vocab_size,
    temperature_ptr,
    min_p_ptr,
    top_ptr,
    bound_ptr,
    key_ptr,
    piece_top_ptr,
    piece_token_ptr,
    piece_count_ptr,
    list_q_ptr,
    list_token_ptr,
    HAS_MASK: tl.constexpr,
    PIECE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Replaces piece_top and piece_token by the largest noisy logit and its token."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        logits_ptr += row * stride_logits_row
        if HAS_MASK:
            mask_ptr += row * stride_mask_row
        token = piece * PIECE + tl.arange(0, PIECE)
        x = load_logits(logits_ptr, mask_ptr, vocab_size, token, HAS_MASK)
        q = distance(x, tl.load(top_ptr + row), temperature)  # [PIECE]
        place = row * tl.num_programs(0) + piece
        bound = tl.load(bound_ptr + row)
        if bound < 0:
            key = tl.load(key_ptr + row).to(tl.uint32, bitcast=True)
            is_near = q <= min_p_bound(min_p_ptr, row)
            score = tl.where(is_near, noisy(q, token, key), -INFINITY)
            best = tl.max(score, axis=0)
            tl.store(piece_top_ptr + place, best)
            first = tl.min(tl.where(score == best, token, vocab_size), axis=0)
            tl.store(piece_token_ptr + place, first)
        else:
            is_near = q <= bound
            count = tl.sum(is_near.to(tl.int32), axis=0)
            tl.store(piece_count_ptr + place, count)
            if count > 0:
                index = tl.cumsum(is_near.to(tl.int32), axis=0) - 1
                is_listed = is_near & (index < CAPACITY)
                tl.store(list_q_ptr + place * CAPACITY + index, q, mask=is_listed)
                tl.store(list_token_ptr + place * CAPACITY + index, token, mask=is_listed)
