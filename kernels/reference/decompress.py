"""bits = sign << 15 | exponent << 7 | mantissa, of a split weight: see kernels/split_weight.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.split_weight import HALF, SplitWeight
from kernels.torch_ops.select_rows import join_exponents


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """Returns the dense weight [N, K], bit-exact BF16, in `out` if given."""
    is_wide = weight.wide_groups()
    lower = weight.exponents.view(*is_wide.shape, HALF)
    upper = torch.zeros_like(lower)
    upper[is_wide] = weight.wide_exponents
    dense = join_exponents(lower, upper, weight.base, weight.sign_mantissa)
    return dense if out is None else out.copy_(dense)
