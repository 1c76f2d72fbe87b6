"""Chooses the experts of each token; the formula is in `kernels/routing.py`.

A program chooses for one token, the best expert first: a value and its id are one integer, whose
largest is the best expert with the lowest id. A row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.integers import next_power_of_2
from kernels.routing import NORM_EPS, ExpertChoice, ExpertRouting, chooses_by_logits

LOG2_E = tl.constexpr(1.4426950408889634)


def route(
    logits: Tensor, bias: Tensor | None, num_chosen: int, routing: ExpertRouting
) -> ExpertChoice:
    """Computes kernels.torch_ops.route with Triton. Raises BadTensor."""
    expect("logits", logits, (None, None), dtype=torch.float32)
    num_tokens, num_experts = logits.shape
    if bias is not None:
        shape = (num_experts,)
        expect("bias", bias, shape, dtype=torch.float32, device=logits.device, is_contiguous=True)
    ids = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return ExpertChoice(ids, weights)
    group_size = num_experts // routing.num_groups
    _route_kernel[(num_tokens,)](
        *(logits, bias, ids, weights, logits.stride(0), float(routing.scale)),
        NUM_CHOSEN=num_chosen,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GROUP_SIZE=group_size,
        IS_SOFTMAX=routing.score == "softmax",
        IS_BY_LOGITS=chooses_by_logits(routing, bias),
        IS_RENORMALISED=routing.is_renormalised,
        EPS=NORM_EPS,
        BLOCK_GROUPS=next_power_of_2(routing.num_groups),
        BLOCK=next_power_of_2(group_size),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return ExpertChoice(ids, weights)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride_row,
    scale,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_BY_LOGITS: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_GROUPS * BLOCK)  # rising with the ids
    group, within = place // BLOCK, place % BLOCK
    is_expert = (group < NUM_GROUPS) & (within < GROUP_SIZE)
    expert = group * GROUP_SIZE + within
    found = logits_ptr + token * stride_row + expert
    logits = tl.load(found, mask=is_expert, other=float("-inf"))
    is_number = logits < float("inf")
    if IS_SOFTMAX:
        powers = tl.exp2((logits - tl.max(logits)) * LOG2_E)
        scores = powers / tl.sum(powers)
    else:
        scores = 1.0 / (1.0 + tl.exp2(-logits * LOG2_E))
    values = logits if IS_BY_LOGITS else scores
    if bias_ptr is not None:
        values += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    values = tl.where((logits == logits) & (values == values), values, float("-inf"))
    if NUM_GROUPS > 1:
        is_best = _is_of_best_group(
            values, is_expert, NUM_GROUPS, TOP_GROUPS, GROUP_SIZE, BLOCK_GROUPS, BLOCK
        )
        values = tl.where(is_best, values, float("-inf"))
    is_chosen = _best(values, is_expert, NUM_CHOSEN, BLOCK_GROUPS * BLOCK)
    weights = tl.where(is_chosen, scores, 0.0)
    if IS_RENORMALISED:
        weights = weights / (tl.sum(weights) + EPS)
    is_right = tl.min(is_number.to(tl.int32)) > 0
    weights = tl.where(is_right, weights * scale, float("nan"))
    slot = token * NUM_CHOSEN + tl.cumsum(is_chosen.to(tl.int32)) - 1
    tl.store(ids_ptr + slot, expert.to(tl.int64), mask=is_chosen)
    tl.store(weights_ptr + slot, weights, mask=is_chosen)


@triton.jit
def _best(values, is_there, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Marks the largest COUNT of the values [BLOCK]; of equal ones the first."""
    keys = tl.where(is_there, _ordered(values, tl.arange(0, BLOCK)), -(2**63))
    is_chosen = keys != keys
    for _ in tl.static_range(COUNT):
        is_next = keys == tl.max(keys)
        is_chosen |= is_next
        keys = tl.where(is_next, -(2**63), keys)
    return is_chosen & is_there


@triton.jit
def _ordered(values, place):
    """Integers in the order of the values, and of equal ones of falling places."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - place)


@triton.jit
def _is_of_best_group(
    values,
    is_expert,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The groups with the largest sums of their two best values."""
    keys = _ordered(values, tl.arange(0, BLOCK_GROUPS * BLOCK))
    keys = tl.reshape(tl.where(is_expert, keys, -(2**63)), (BLOCK_GROUPS, BLOCK))
    values = tl.reshape(values, (BLOCK_GROUPS, BLOCK))
    is_first = keys == tl.max(keys, axis=1)[:, None]
    sums = tl.max(values, axis=1)
    if GROUP_SIZE > 1:
        sums += tl.max(tl.where(is_first, float("-inf"), values), axis=1)
    group = tl.arange(0, BLOCK_GROUPS)
    is_best = _best(sums, group < NUM_GROUPS, TOP_GROUPS, BLOCK_GROUPS)
    spread = tl.broadcast_to(is_best.to(tl.int32)[:, None], (BLOCK_GROUPS, BLOCK))
    return tl.reshape(spread, (BLOCK_GROUPS * BLOCK,)) > 0
