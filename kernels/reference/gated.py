"""The gates of gated MLPs.

SwiGLU: silu(gate) · up, with silu(g) = g / (1 + exp(-g)).
GeGLU:  gelu(gate) · up, with the tanh form gelu(g) = g / 2 · (1 + tanh(u)),
        u = sqrt(2 / pi) · (g + 0.044715 g³).
"""

from __future__ import annotations

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
