"""The residual sum and its RMS normalisation: s = x + residual, y = rms_norm(s)."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.layer.rms_norm import rms_norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool = False,
    is_rounded_once: bool = False,
) -> tuple[Tensor, Tensor]:
    """x, residual [..., hidden], weight [hidden] -> (y, s), both like x; s is rounded first."""
    total = x + residual
    mode = {"has_unit_offset": has_unit_offset, "is_rounded_once": is_rounded_once}
    return rms_norm(total, weight, eps, **mode), total
