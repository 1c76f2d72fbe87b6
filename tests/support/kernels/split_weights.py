"""Weights to split: realistic ones, and extreme ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.split_weight import GROUP, HALF, WORD_GROUPS, SplitWeight


def normal_weight(num_rows: int, width: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, width, generator=generator) * 0.02).bfloat16()


def with_outliers(weight: Tensor, share: float) -> Tensor:
    """Replaces this share of weights by random ones of the 65,536 bit patterns, including NaN."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(torch.int16)
    is_other = torch.rand(weight.shape, generator=generator) < share
    return torch.where(is_other, bits, weight.view(torch.int16)).view(torch.bfloat16)


def all_bit_patterns() -> Tensor:
    """[256, 256]: a row for each upper byte."""
    return torch.arange(2**16).to(torch.int16).view(256, 256).view(torch.bfloat16)


def bits_of(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def empty_split(num_rows: int, width: int) -> SplitWeight:
    """Returns uninitialised planes with the right types and sizes, on the default device."""
    num_groups = -(-width // GROUP)
    return SplitWeight(
        sign_mantissa=torch.empty(num_rows, width, dtype=torch.uint8),
        exponents=torch.empty(num_rows, num_groups * HALF, dtype=torch.uint8),
        base=torch.empty(num_rows, dtype=torch.uint8),
        is_wide=torch.empty(num_rows, -(-num_groups // WORD_GROUPS), dtype=torch.int32),
        wide_start=torch.empty(num_rows, -(-num_groups // WORD_GROUPS), dtype=torch.int32),
        wide_exponents=torch.empty(1, HALF, dtype=torch.uint8),
    )
