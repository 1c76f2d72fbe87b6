"""The gate of a GeGLU block: gelu(gate) · up, with the tanh form of gelu.

gelu(g) = g / 2 · (1 + tanh(u)) = g / (1 + exp(-2u)), with u = sqrt(2 / pi) · (g + 0.044715 g³).
"""

from __future__ import annotations

import math

from torch import Tensor

from kernels.reference.tiles import LOG2_E, TILE, exp2_

FACTOR = -2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * intermediate] (gate first) -> [T, intermediate].

    FP32 inside. Spelled out with an exponential that has no scalar tail, as in `silu_and_mul`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float()
    exponent = gate.square().mul_(CUBIC).add_(1.0).mul_(gate).mul_(FACTOR)
    decay = exp2_(exponent.mul_(LOG2_E)) if gate.shape[1] % TILE == 0 else exponent.exp_()
    return (gate / decay.add_(1.0)).mul_(up).to(gate_up.dtype)
