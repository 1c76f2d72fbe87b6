"""RMS normalisation: y = (x · rsqrt(mean(x²) + eps)) · weight, one row per token."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.intrinsics import FEW_ROWS, LANES, array, fma, narrow, sum_of_lanes, widen

_f32 = np.float32


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool = False,
    is_rounded_once: bool = False,
) -> Tensor:
    """x [..., hidden], weight [hidden] -> the shape and dtype of x.

    The mean and the scaling are FP32; the product with the weight is in the dtype of x, as in the
    published checkpoints' own code. `has_unit_offset`: the factor is 1 + weight, in FP32 (Gemma).
    `is_rounded_once`: it is weight, in FP32 (gpt-oss): the norm of rows in FP32.
    """
    if is_rounded_once and x.dtype != torch.float32:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    arguments = array(rows), array(weight), _f32(eps), has_unit_offset, array(out)
    if len(rows) <= FEW_ROWS:
        _rms_norm(*arguments, 0, len(rows))
    else:
        _rms_norm_in_parallel(*arguments, numba.get_num_threads())
    return out.view(x.shape)


@compiled(parallel=True)
def _rms_norm_in_parallel(
    x: Any, weight: Any, eps: Any, has_unit_offset: bool, out: Any, num_tasks: int
) -> None:
    for task in prange(num_tasks):
        first, end = len(x) * task // num_tasks, len(x) * (task + 1) // num_tasks
        _rms_norm(x, weight, eps, has_unit_offset, out, first, end)


@compiled()
def _rms_norm(
    x: Any, weight: Any, eps: Any, has_unit_offset: bool, out: Any, first: int, end: int
) -> None:
    hidden = x.shape[1]
    whole = hidden // LANES * LANES
    for row in range(first, end):
        sums = np.zeros(LANES, _f32)
        pieces = x[row, :whole].reshape((-1, LANES))
        for piece in range(pieces.shape[0]):
            for lane in range(LANES):
                value = widen(pieces[piece, lane])
                sums[lane] = fma(value, value, sums[lane])
        for index in range(whole, hidden):
            value = widen(x[row, index])
            sums[index - whole] = fma(value, value, sums[index - whole])
        mean = sum_of_lanes(sums.ctypes.data) / _f32(hidden)
        scale = _f32(1.0) / np.sqrt(mean + eps)
        if has_unit_offset:
            for index in range(hidden):
                factor = widen(weight[index]) + _f32(1.0)
                out[row, index] = narrow(widen(x[row, index]) * scale * factor, out.dtype)
        else:
            for index in range(hidden):
                rounded = narrow(widen(x[row, index]) * scale, out.dtype)
                out[row, index] = narrow(widen(rounded) * widen(weight[index]), out.dtype)
