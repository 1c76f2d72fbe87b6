"""The gate of a SwiGLU block: silu(gate) · up, with silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * intermediate], gate first -> [T, intermediate]; computed in FP32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate.float()) * up).to(gate_up.dtype)
