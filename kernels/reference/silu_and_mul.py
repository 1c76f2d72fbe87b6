"""The gate of a SwiGLU block: silu(gate) · up, with silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.tiles import LOG2_E, TILE, exp2_


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * intermediate] (gate first) -> [T, intermediate].

    FP32 inside. Spelled out, because torch's vectorised silu and its scalar tail differ by a bit,
    and which element falls into the tail depends on the batch.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float()
    # exp is slower, and has no tail at all
    decay = exp2_(gate * -LOG2_E) if gate.shape[1] % TILE == 0 else gate.neg().exp_()
    return (gate / decay.add_(1.0)).mul_(up).to(gate_up.dtype)
