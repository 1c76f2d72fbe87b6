"""The gates of gated MLPs: silu(gate) · up and gelu(gate) · up, in FP32, rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.intrinsics import LOG2_E, array, exp2, narrow, widen
from kernels.cpu.simd.tasks import num_tasks

_f32 = np.float32
GELU_FACTOR = _f32(-2 * math.sqrt(2 / math.pi) * LOG2_E)
GELU_CUBIC = _f32(0.044715)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * intermediate], gate first -> [T, intermediate]; silu(g) = g / (1 + e**-g)."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _silu_and_mul(array(gate_up), array(out), num_tasks(len(out)))
    return out


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes `silu_and_mul` with the tanh form of gelu.

    g / 2 · (1 + tanh(u)) = g / (1 + e**-2u), u = sqrt(2 / pi) · (g + 0.044715 g³).
    """
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _gelu_and_mul(array(gate_up), array(out), num_tasks(len(out)))
    return out


def clamped_gate(
    gate_up: Tensor, bias: Tensor, experts: Tensor, *, limit: float, alpha: float
) -> Tensor:
    """Computes kernels.reference.gated.clamped_gate, with e**x as in the others."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    numbers = array(gate_up), array(bias), experts.contiguous().numpy()
    _clamped_gate(*numbers, _f32(limit), _f32(-alpha * LOG2_E), array(out), num_tasks(len(out)))
    return out


@compiled(parallel=True)
def _silu_and_mul(gate_up: Any, out: Any, num_tasks: int) -> None:
    for task in prange(num_tasks):
        first, end = len(out) * task // num_tasks, len(out) * (task + 1) // num_tasks
        for row in range(first, end):
            _silu_row(gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :], out[row])


@compiled(is_inlined=True)
def _silu_row(gate: Any, up: Any, out: Any) -> None:
    for index in range(len(out)):
        x = widen(gate[index])
        decay = exp2(min(x * _f32(-LOG2_E), _f32(128.0)))
        out[index] = narrow(x / (_f32(1.0) + decay) * widen(up[index]), out.dtype)


@compiled(parallel=True)
def _gelu_and_mul(gate_up: Any, out: Any, num_tasks: int) -> None:
    for task in prange(num_tasks):
        first, end = len(out) * task // num_tasks, len(out) * (task + 1) // num_tasks
        for row in range(first, end):
            _gelu_row(gate_up[row, : out.shape[1]], gate_up[row, out.shape[1] :], out[row])


@compiled(is_inlined=True)
def _gelu_row(gate: Any, up: Any, out: Any) -> None:
    for index in range(len(out)):
        x = widen(gate[index])
        exponent = (x * x * GELU_CUBIC + _f32(1.0)) * x * GELU_FACTOR
        decay = exp2(min(exponent, _f32(128.0)))
        out[index] = narrow(x / (_f32(1.0) + decay) * widen(up[index]), out.dtype)


@compiled(parallel=True)
def _clamped_gate(
    gate_up: Any, bias: Any, experts: Any, limit: Any, factor: Any, out: Any, num_tasks: int
) -> None:
    for task in prange(num_tasks):
        first, end = len(out) * task // num_tasks, len(out) * (task + 1) // num_tasks
        for row in range(first, end):
            _clamped_row(gate_up[row], bias[experts[row]], limit, factor, out[row])


@compiled(is_inlined=True)
def _clamped_row(gate_up: Any, bias: Any, limit: Any, factor: Any, out: Any) -> None:
    width = len(out)
    for index in range(width):
        x = min(widen(gate_up[index]) + widen(bias[index]), limit)
        up = widen(gate_up[width + index]) + widen(bias[width + index])
        up = max(min(up, limit), -limit)
        decay = exp2(min(x * factor, _f32(128.0)))
        out[index] = narrow(x / (_f32(1.0) + decay) * (up + _f32(1.0)), out.dtype)
