"""bits = sign << 15 | exponent << 7 | mantissa, of a split weight: see kernels/split_weight.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.split_weight import HALF, SplitWeight


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """The dense weight [N, K], BF16 to the last bit, in `out` if given."""
    is_wide = weight.wide_groups()
    lower = weight.exponents.view(*is_wide.shape, HALF)
    upper = torch.zeros_like(lower)
    upper[is_wide] = weight.wide_exponents
    codes = torch.cat((lower & 15 | upper << 4, lower >> 4 | upper & 0xF0), dim=-1)
    codes = codes.flatten(1)[:, : weight.shape[1]]
    exponent = (codes + weight.base[:, None]).int()
    rest = weight.sign_mantissa.int()
    bits = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    dense = bits.to(torch.int16).view(torch.bfloat16)
    return dense if out is None else out.copy_(dense)
