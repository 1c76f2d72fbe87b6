"""The gate of a SwiGLU block: silu(gate) · up, with silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

from torch import Tensor

from kernels.gpu.rows.gated import gated


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes `silu_and_mul` of kernels.reference.gated with Triton. Raises BadTensor."""
    return gated(gate_up, is_gelu=False)
