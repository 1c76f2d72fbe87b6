"""The gate of a GeGLU block: gelu(gate) · up, with the tanh form of gelu.

gelu(g) = g / 2 · (1 + tanh(u)), u = sqrt(2 / pi) · (g + 0.044715 g³).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * intermediate], gate first -> [T, intermediate]; computed in FP32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gelu(gate.float(), approximate="tanh") * up).to(gate_up.dtype)
