"""Dense weights of the formats in which checkpoints store quantized ones, as definitions."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize_int4(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, width: int, dtype: torch.dtype
) -> Tensor:
    """w[n, k] = round((code - zero) · scale[n, k / group]) in `dtype`, the product in FP32.

    compressed-tensors' `pack-quantized`: packed int32 [N, ⌈K / 8⌉], eight codes a word, low nibble
    first; scale [N, groups]; zero_point int32 [⌈N / 8⌉, groups], packed along N, or None: 8.
    """
    codes = _unpacked(packed, width)
    groups = scale.shape[1]
    spread = torch.arange(width) // -(-width // groups)
    zeros: Tensor | int = 8
    if zero_point is not None:
        zeros = _unpacked(zero_point.t(), len(packed)).t()[:, spread]
    return ((codes - zeros).float() * scale.float()[:, spread]).to(dtype)


def dequantize_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w[n, k] = round(code · scale[n / 128, k / 128]) in `dtype`, the product in FP32.

    DeepSeek-V3's blocks: codes float8_e4m3fn [N, K]; scale [⌈N / 128⌉, ⌈K / 128⌉], which
    checkpoints call `weight_scale_inv`.
    """
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return (codes.float() * scale.float()[rows][:, columns]).to(dtype)


def _unpacked(words: Tensor, width: int) -> Tensor:
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1)[:, :width]
