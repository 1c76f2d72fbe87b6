"""The k largest of each row; among equal ones the lowest index comes first.

    key = order(x) · 2³² + (2³¹ - 1 - index),  order(x) as in kernels.torch_ops.top_k

Each piece of a row gives its k largest keys, and one program per row merges them, by taking the
largest key and removing it, k times: nothing is sorted, and x is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.integers import cdiv, next_power_of_2
from kernels.torch_ops.top_k import top_k as reference_top_k

PIECE = 4096
MOST = 64  # taking one at a time is slower than sorting for more
MOST_MERGED = 16_384  # keys per program

_LEAST = tl.constexpr(-(1 << 63))


def top_k(x: Tensor, k: int) -> Tensor:
    """Computes kernels.torch_ops.top_k, with Triton for small k. Raises BadTensor."""
    expect("x", x, (None, None), dtype=torch.float32)
    num_rows, num_columns = x.shape
    num_pieces = cdiv(num_columns, PIECE)
    k = min(k, num_columns)
    if not k or not num_rows or k > MOST or num_pieces * k > MOST_MERGED:
        return reference_top_k(x, k)
    keys = torch.empty((num_rows, num_pieces, k), dtype=torch.int64, device=x.device)
    indices = torch.empty((num_rows, k), dtype=torch.int64, device=x.device)
    _piece_kernel[(num_pieces, num_rows)](
        *(x, keys, x.stride(0), num_columns, k),
        PIECE=min(PIECE, next_power_of_2(num_columns)),
        num_warps=8,
        enable_fp_fusion=True,
    )
    _merge_kernel[(num_rows,)](
        *(keys, indices, num_pieces * k, k),
        BLOCK=next_power_of_2(num_pieces * k),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return indices


@triton.jit(do_not_specialize=["k"])
def _piece_kernel(x_ptr, keys_ptr, stride_x_row, num_columns, k, PIECE: tl.constexpr):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = piece * PIECE + tl.arange(0, PIECE)  # [PIECE]
    is_inside = index < num_columns
    x = tl.load(x_ptr + row * stride_x_row + index, mask=is_inside, other=0.0)
    order = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: zero has one bit pattern
    order ^= (order >> 31) & 0x7FFFFFFF
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    keys = tl.where(is_inside, keys, _LEAST)
    place = keys_ptr + (row * tl.num_programs(0) + piece) * k
    for number in range(k):
        largest = tl.max(keys, axis=0)
        tl.store(place + number, largest)
        keys = tl.where(keys == largest, _LEAST, keys)


@triton.jit(do_not_specialize=["num_keys", "k"])
def _merge_kernel(keys_ptr, indices_ptr, num_keys, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)  # [BLOCK]
    keys = tl.load(keys_ptr + row * num_keys + place, mask=place < num_keys, other=_LEAST)
    for number in range(k):
        largest = tl.max(keys, axis=0)
        tl.store(indices_ptr + row * k + number, 0x7FFFFFFF - (largest & 0x7FFFFFFF))
        keys = tl.where(keys == largest, _LEAST, keys)
