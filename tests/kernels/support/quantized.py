"""Random quantized tensors as checkpoints store them, and their dense weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized_weight import Code, QuantizedWeight
from kernels.reference.dequantize import (
    dequantize_fp8,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_rows,
)
from kernels.transcode import (
    CodePart,
    Fp8Part,
    Int4Part,
    fp8_weight,
    grouped_weight,
    int4_weight,
    packed_part,
)

# Scales that rounding, signs and subnormal numbers depend on.
ODD_SCALES = (0.0, -0.0, 1e-40, 2.0**-133, 2.0**-126, -0.5, 3e38)


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def random_int4(
    num_rows: int,
    width: int,
    group: int,
    *,
    has_zeros: bool,
    scale_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[float, ...] = (),
) -> tuple[QuantizedWeight, Tensor]:
    """`scales` replace some of the random ones."""
    groups = -(-width // group)
    scale = (torch.randn(num_rows, groups) * 0.02).to(scale_dtype)
    for index, each in enumerate(scales):
        scale.view(-1)[index * 5 % scale.numel()] = each
    packed = random_words(num_rows, -(-width // 8))
    zeros = random_words(-(-num_rows // 8), groups) if has_zeros else None
    weight = int4_weight([Int4Part(packed, scale, zeros)], width, group, dtype)
    return weight, dequantize_int4(packed, scale, zeros, width, dtype)


def random_mxfp4(
    num_rows: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    exponents: tuple[int, ...] = (),
) -> tuple[QuantizedWeight, Tensor]:
    """`exponents` replace some of the random ones."""
    blocks = torch.randint(0, 256, (num_rows, width // 32, 16)).to(torch.uint8)
    scale = torch.randint(110, 130, (num_rows, width // 32)).to(torch.uint8)
    for index, each in enumerate(exponents):
        scale.view(-1)[index * 5 % scale.numel()] = each
    part = packed_part(blocks.flatten(1), scale, None, width=width, num_bits=4)
    weight = grouped_weight([part], width, 32, dtype, code="e2m1")
    return weight, dequantize_mxfp4(blocks, scale, dtype)


def random_bytes(
    num_rows: int,
    width: int,
    group: int,
    code: Code,
    *,
    has_zeros: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[float, ...] = (),
) -> tuple[QuantizedWeight, Tensor]:
    """Codes of eight bits with a scale per row and group; those of E4M3 have NaN among them."""
    groups = -(-width // group)
    scale = (torch.randn(num_rows, groups) * 0.02).to(scale_dtype)
    for index, each in enumerate(scales):
        scale.view(-1)[index * 5 % scale.numel()] = each
    codes = torch.randint(0, 256, (num_rows, width)).to(torch.uint8)
    zeros = torch.randint(0, 256, (num_rows, groups)).to(torch.uint8) if has_zeros else None
    part = CodePart(num_rows, lambda first, end: codes[first:end], scale, zeros)
    weight = grouped_weight([part], width, group, dtype, code=code)
    if code == "e4m3":
        return weight, dequantize_rows(codes.view(torch.float8_e4m3fn), scale, None, dtype)
    zero = torch.full((num_rows, groups), 128) if zeros is None else zeros
    return weight, dequantize_rows(codes, scale, zero, dtype)


def random_fp8(
    num_rows: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[float, ...] = (),
    has_nan: bool = False,
) -> tuple[QuantizedWeight, Tensor]:
    codes = torch.randint(0, 256, (num_rows, width)).to(torch.uint8)
    if not has_nan:
        codes[(codes & 127) == 127] = 0x80
    scale = torch.randn(-(-num_rows // 128), -(-width // 128)) * 0.01
    for index, each in enumerate(scales):
        scale.view(-1)[index % scale.numel()] = each
    stored = codes.view(torch.float8_e4m3fn)
    return fp8_weight([Fp8Part(stored, scale)], dtype), dequantize_fp8(stored, scale, dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """NaN may have any payload."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    is_same = found.contiguous().view(bits) == expected.contiguous().view(bits)
    assert bool((is_same | (found.isnan() & expected.isnan())).all())
