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


def dequantize_mxfp4(blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w[..., 32 · g + k] = E2M1(code k of group g) · 2^(scale[..., g] - 127), exactly, in `dtype`.

    gpt-oss's MXFP4 (OCP Microscaling 1.0): blocks uint8 [..., K / 32, 16], the code of the even
    column in the low nibble; scale uint8 [..., K / 32], where 255 is NaN.
    """
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = torch.cat((numbers, -numbers))[codes]
    powers = 2.0 ** (scale.double() - 127)
    powers[scale == 255] = torch.nan
    return (values * powers.unsqueeze(-1)).flatten(-2).to(dtype)


def _unpacked(words: Tensor, width: int, num_bits: int = 4) -> Tensor:
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (1 << num_bits) - 1).flatten(1)[:, :width]


def dequantize_packed(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    width: int,
    num_bits: int,
    dtype: torch.dtype,
    groups: Tensor | None = None,
) -> Tensor:
    """Computes `dequantize_int4` of words of codes of `num_bits`; `groups` [K] are those of columns
    that are not in order.
    """
    codes = _unpacked(packed, width, num_bits)
    zeros: Tensor = torch.full(scale.shape, 1 << num_bits - 1)
    if zero_point is not None:
        zeros = _unpacked(zero_point.t(), len(packed), num_bits).t()
    return _scaled(codes, zeros, scale, groups, dtype)


def dequantize_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """w[n, k] = round((code - zero) · scale) in `dtype`: AutoAWQ's gemm packing.

    qweight int32 [K, N / 8], qzeros int32 [groups, N / 8], scales [groups, N]: nibble j of a word
    is row 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
    """

    def codes(words: Tensor) -> Tensor:
        found = torch.empty(len(words), words.shape[1], 8, dtype=torch.int64)
        for nibble, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found[:, :, row] = (words >> 4 * nibble) & 15
        return found.flatten(1).t()

    return _scaled(codes(qweight), codes(qzeros), scales.t(), None, dtype)


def dequantize_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    groups: Tensor | None,
    *,
    num_bits: int,
    is_offset: bool,
    dtype: torch.dtype,
) -> Tensor:
    """w[n, k] = round((code - zero) · scale[groups[k], n]) in `dtype`: GPTQ's packing.

    qweight int32 [K / codes of a word, N] and qzeros int32 [groups, N / codes of a word], lowest
    bits first. With `is_offset` (version 1) qzeros are words from which a 1 in each code was taken.
    """
    words = qzeros.long() & 0xFFFFFFFF
    if is_offset:
        words = words + sum(1 << at for at in range(0, 32, num_bits)) & 0xFFFFFFFF
    codes = _unpacked(qweight.t().long(), qweight.shape[0] * 32 // num_bits, num_bits)
    zeros = _unpacked(words, scales.shape[1], num_bits).t()
    return _scaled(codes, zeros, scales.t(), groups, dtype)


def dequantize_rows(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """w[n, k] = round((code - zero) · scale) in `dtype`: signed bytes or E4M3 [N, K] with a scale
    [N, groups], or one number.
    """
    scale = scale.view(1, -1) if scale.dim() < 2 else scale
    zeros = torch.zeros(scale.shape) if zero_point is None else zero_point
    shape = (len(codes), scale.shape[1])
    return _scaled(codes.float(), zeros.expand(shape), scale.expand(shape), None, dtype)


def _scaled(
    codes: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """codes [N, K], zeros and scale [N, groups]"""
    width = codes.shape[1]
    if groups is None:
        groups = torch.arange(width) // -(-width // scale.shape[1])
    group = groups.long()
    return ((codes - zeros[:, group]).float() * scale.float()[:, group]).to(dtype)
