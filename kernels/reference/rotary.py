"""Rotary position embedding over the two halves of a head, or of its first part (RoFormer)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, num_heads, head_dim], cos and sin [T, rotary_dim / 2] FP32 -> shape and dtype of x.

    With the first rotary_dim elements of a head = (a, b) split in the middle:
    (a·cos - b·sin, b·cos + a·sin), in FP32, rounded once. The rest of the head is unchanged.
    """
    half = cos.shape[1]
    first, second, rest = x.float().split((half, half, x.shape[2] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, rotary_dim / 2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(x.dtype)
