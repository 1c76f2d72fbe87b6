"""RMS normalisation: y = (x · rsqrt(mean(x²) + eps)) · weight, one row a token."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden], weight [hidden] -> [T, hidden] in the dtype of x.

    The mean and the scaling are FP32; the product with the weight is in the dtype of x, as in the
    published checkpoints' own code.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)
