"""The residual sum and its RMS normalisation, fused: s = x + residual, y = rms_norm(s)."""

from __future__ import annotations

from torch import Tensor

from kernels.check_tensor import expect
from kernels.gpu.rows.rms_norm import norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool = False,
    is_rounded_once: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes kernels.reference.add_rms_norm with Triton. Raises BadTensor."""
    expect("residual", residual, x.shape, dtype=x.dtype, device=x.device)
    mode = {"has_unit_offset": has_unit_offset, "is_rounded_once": is_rounded_once}
    return norm(x, residual, weight, eps, **mode)
