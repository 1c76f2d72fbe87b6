"""A linear layer whose output rows do not depend on how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Below these counts the CPU libraries use other kernels, with other bits: rows are padded up to a
# multiple. From MIN_ROWS on every count gives the same bits (measured for K up to 4,096).
MIN_ROWS = 16
ROW_MULTIPLE = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 16}


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    if num_rows >= MIN_ROWS:
        return num_rows
    multiple = ROW_MULTIPLE[dtype]
    return -(-num_rows // multiple) * multiple


class Linear(nn.Module):
    """y = x · weightᵀ + bias over x [T, in_features]. Parameters start out unset."""

    def __init__(
        self, in_features: int, out_features: int, *, has_bias: bool = False, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
            if has_bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return row_invariant_linear(x, self.weight, self.bias)


def row_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bias is added after the product is rounded: a fused one changes the kernel that runs."""
    num_rows = x.shape[0]
    num_padded = padded_rows(num_rows, x.dtype)
    if num_padded != num_rows:
        x = nn.functional.pad(x, (0, 0, 0, num_padded - num_rows))
    y = nn.functional.linear(x, weight)[:num_rows]
    return y if bias is None else y.add_(bias)
