"""Rotary position embedding over the two halves of a head (Su et al., RoFormer)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, num_heads, head_dim], cos and sin [T, head_dim / 2] FP32 -> as x.

    With x = (a, b) split in the middle: (a·cos - b·sin, b·cos + a·sin), in FP32, rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, head_dim / 2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
