"""Decoded rows of a split weight, for embedding lookups. See kernels/split_weight.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.split_weight import HALF, WORD_GROUPS, SplitWeight


def select_rows(weight: SplitWeight, row_ids: Tensor) -> Tensor:
    """row_ids [T] -> those rows [T, K]. Shapes do not depend on data: a graph can capture it."""
    base, rest = weight.base[row_ids], weight.sign_mantissa[row_ids]
    lower = weight.exponents[row_ids].unflatten(1, (-1, HALF))
    upper = torch.zeros_like(lower)
    if len(weight.wide_exponents):
        num_groups, bit = lower.shape[1], torch.arange(WORD_GROUPS, device=weight.device)
        is_wide = weight.is_wide[row_ids][:, :, None] >> bit & 1  # [T, words, groups of a word]
        before = is_wide.cumsum(-1) - is_wide
        place = (weight.wide_start[row_ids][:, :, None] + before).flatten(1)[:, :num_groups]
        is_wide = is_wide.flatten(1)[:, :num_groups]
        found = weight.wide_exponents[place.clamp_(max=len(weight.wide_exponents) - 1)]
        upper = found * is_wide[:, :, None].to(torch.uint8)
    return join_exponents(lower, upper, base, rest)


def join_exponents(lower: Tensor, upper: Tensor, base: Tensor, rest: Tensor) -> Tensor:
    """lower, upper [R, groups, 32] of codes, base [R], sign and mantissa [R, K] -> [R, K] BF16."""
    codes = torch.cat((lower & 15 | upper << 4, lower >> 4 | upper & 0xF0), dim=-1)
    exponent = (codes.flatten(1)[:, : rest.shape[1]] + base[:, None]).int()
    bits = (rest.int() & 0x80) << 8 | exponent << 7 | rest.int() & 0x7F
    return bits.to(torch.int16).view(torch.bfloat16)
