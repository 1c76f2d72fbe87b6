"""RMS normalisation: y = (x · rsqrt(mean(x²) + eps)) · weight, one row per token."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool = False,
    is_rounded_once: bool = False,
) -> Tensor:
    """x [..., hidden], weight [hidden] -> the shape and dtype of x.

    The mean and the scaling are FP32; the product with the weight is in the dtype of x, as
    in the published checkpoints' own code. With `has_unit_offset` the factor is 1 + weight,
    in FP32 (Gemma). If it `is_rounded_once`, it is weight, in FP32 (gpt-oss).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    if has_unit_offset:
        return (wide * scale).mul_(weight.float() + 1.0).to(x.dtype)
    if is_rounded_once:
        return (wide * scale).mul_(weight.float()).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)
