"""The gates of gated MLPs.

SwiGLU: silu(gate) · up, with silu(g) = g / (1 + exp(-g)).
GeGLU:  gelu(gate) · up, with the tanh form gelu(g) = g / 2 · (1 + tanh(u)),
        u = sqrt(2 / pi) · (g + 0.044715 g³).
Clamped: (u + 1) · g / (1 + exp(-alpha · g)), with g = min(gate, limit) and u = up within ± limit
        (gpt-oss).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns SwiGLU of gate_up [T, 2 * intermediate], gate first: [T, intermediate], computed in
    FP32.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate.float()) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns GeGLU of gate_up [T, 2 * intermediate], gate first: [T, intermediate], computed in
    FP32.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (gelu(gate.float(), approximate="tanh") * up).to(gate_up.dtype)


def clamped_gate(
    gate_up: Tensor, bias: Tensor, experts: Tensor, *, limit: float, alpha: float
) -> Tensor:
    """Returns the clamped gate of gate_up [S, 2 * intermediate], gate first, plus the bias of each
    row's expert: [S, intermediate], computed in FP32.

    bias [E, 2 * intermediate]; experts [S] int64.
    """
    gate, up = (gate_up.float() + bias.index_select(0, experts)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(alpha * gate))).to(gate_up.dtype)
