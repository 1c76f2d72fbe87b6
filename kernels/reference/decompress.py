"""bits = sign << 15 | exponent << 7 | mantissa, of a split weight: see kernels/split_weight.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.split_weight import GRANULE_BYTES, GROUP, HALF, SplitWeight


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """The dense weight [N, K], BF16 to the last bit, in `out` if given."""
    num_rows, width = weight.shape
    upper = weight.exponents.new_zeros((*weight.wide_granules().shape, GRANULE_BYTES))
    upper[weight.wide_granules()] = weight.wide_exponents
    lower = weight.exponents.view(num_rows, weight.exponents.shape[1] // HALF, HALF)
    upper = upper.view(lower.shape)
    codes = torch.cat((lower & 15 | upper << 4, lower >> 4 | upper & 0xF0), dim=-1)
    codes = codes.view(num_rows, codes.shape[1] * GROUP)[:, :width]
    exponent = (codes + weight.base[:, None]).int()
    rest = weight.sign_mantissa.int()
    bits = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    dense = bits.to(torch.int16).view(torch.bfloat16)
    return dense if out is None else out.copy_(dense)
