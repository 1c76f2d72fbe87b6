"""y = x · weightᵀ + bias, the bias added after the product is rounded."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in the dtype of x.

    With `is_batch_invariant`, a row's bits do not depend on the number of rows; here, each row is
    computed alone.
    """
    rows = x.split(1) if is_batch_invariant and len(x) else (x,)
    y = torch.cat([torch.nn.functional.linear(row, weight) for row in rows])
    return y if bias is None else y.add_(bias)


def per_head_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x [T, H, K], weight [H, N, K] -> x[t, h] · weight[h]ᵀ [T, H, N], in `out` if it is given. A
    row's bits do not depend on the other rows.
    """
    products = [
        linear(x[:, head], each, is_batch_invariant=True) for head, each in enumerate(weight)
    ]
    product = torch.stack(products, dim=1)
    return product if out is None else out.copy_(product)
