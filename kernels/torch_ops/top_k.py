"""The k largest of each row; among equal ones the lowest index comes first.

    key = order(x) · n + (n - 1 - index)

order(x) maps FP32 to integers of the same order, by its bits: for negative numbers all but the
sign are flipped. No two keys of a row are equal, so every device returns the same k in the same
order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(x: Tensor, k: int) -> Tensor:
    """x [R, n] FP32 -> [R, min(k, n)] int64 indices, in descending order of x."""
    num_columns = x.shape[1]
    if k == 0:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    order = (x + 0.0).view(torch.int32)  # + 0.0: zero has one bit pattern
    order ^= (order >> 31) & 0x7FFFFFFF
    index = torch.arange(num_columns, device=x.device)
    keys = order.long().mul_(num_columns).add_(num_columns - 1 - index)
    return keys.topk(min(k, num_columns), dim=-1).indices
