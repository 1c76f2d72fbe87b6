"""Sorts the choices of tokens by expert, and adds the experts' results of each token.

Sorting: a program counts the choices of lower experts, then numbers those of its own expert in
order; nothing is added atomically, so the order is always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, expect
from kernels.integers import cdiv
from kernels.routing import ExpertRows

BLOCK = 1024


def sort_by_expert(ids: Tensor, num_experts: int, sums: Tensor | None = None) -> ExpertRows:
    """Computes `sort_by_expert` of kernels.torch_ops.expert_rows with Triton. Raises BadTensor."""
    expect("ids", ids, (None, None), dtype=torch.int64, is_contiguous=True)
    if sums is not None:
        given = {"dtype": torch.int64, "device": ids.device, "is_contiguous": True}
        expect("sums", sums, (num_experts + 1,), **given)  # type: ignore[arg-type]
    tokens = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=ids.device)
    places = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    _sort_kernel[(num_experts + 1,)](
        *(ids, tokens, offsets, places, sums, ids.numel()),
        NUM_CHOSEN=ids.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ExpertRows(tokens, offsets, places)


def add_experts(
    y: Tensor, places: Tensor, weights: Tensor | None, shared: Tensor | None, width: int
) -> Tensor:
    """Computes `add_experts` of kernels.torch_ops.expert_rows with Triton. Raises BadTensor."""
    num_tokens, num_chosen = places.shape
    device = y.device
    expect("y", y, (None, None), dtype=FLOATS)
    given = {"dtype": torch.int64, "device": device, "is_contiguous": True}
    expect("places", places, (None, None), **given)  # type: ignore[arg-type]
    if weights is not None:
        given["dtype"] = torch.float32
        expect("weights", weights, places.shape, **given)  # type: ignore[arg-type]
    if shared is not None:
        expect("shared", shared, (num_tokens, width), dtype=y.dtype, device=device)
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=device)
    if not out.numel():
        return out
    _add_kernel[(num_tokens, cdiv(width, BLOCK))](
        *(y, places, weights, shared, out, y.stride(0)),
        *(0 if shared is None else shared.stride(0), width),
        NUM_CHOSEN=num_chosen,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _sort_kernel(
    ids_ptr,
    tokens_ptr,
    offsets_ptr,
    places_ptr,
    sums_ptr,
    num_rows,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids_ptr + row, mask=row < num_rows, other=2**62)
        lower += (chosen < expert).to(tl.int32)
    place = tl.sum(lower)
    tl.store(offsets_ptr + expert, place.to(tl.int64))
    if sums_ptr is not None:  # no other program has this one
        tl.store(sums_ptr + expert, tl.load(sums_ptr + expert) + place)
    for start in tl.range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids_ptr + row, mask=row < num_rows, other=2**62)
        is_own = chosen == expert
        places = place + tl.cumsum(is_own.to(tl.int32)) - 1
        tl.store(places_ptr + row, places.to(tl.int64), mask=is_own)
        tl.store(tokens_ptr + places, (row // NUM_CHOSEN).to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32))


@triton.jit
def _add_kernel(
    y_ptr,
    places_ptr,
    weights_ptr,
    shared_ptr,
    out_ptr,
    stride_y,
    stride_shared,
    width,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(NUM_CHOSEN):
        place = tl.load(places_ptr + token * NUM_CHOSEN + slot)
        row = tl.load(y_ptr + place * stride_y + column, mask=is_inside, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + token * NUM_CHOSEN + slot)
        total = row if slot == 0 else total + row
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * stride_shared + column, mask=is_inside, other=0.0)
        total += shared.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=is_inside)
