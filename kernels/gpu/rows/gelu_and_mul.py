"""The gate of a GeGLU block: gelu(gate) · up, with the tanh form of gelu."""

from __future__ import annotations

from torch import Tensor

from kernels.gpu.rows.gated import gated


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes `gelu_and_mul` of kernels.reference.gated with Triton. Raises BadTensor."""
    return gated(gate_up, is_gelu=True)
