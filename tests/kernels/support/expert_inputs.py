"""Rows of experts, some of which have none or all, and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.routing import ExpertRows
from kernels.sum_lanes import SumLanes
from kernels.torch_ops.expert_rows import sort_by_expert

# Some lanes are empty; one lane, as of a product that is not summed in lanes.
LANES = {
    "lanes": SumLanes.of((0, 32, 96, 96, 128, 160, 224, 256, 288)),
    "one": SumLanes.of((0, 96)),
}
NUM_EXPERTS, NUM_COLUMNS = 5, 96


def expert_rows(num_tokens: int, *, is_skewed: bool = False) -> ExpertRows:
    """Of two experts of each token; skewed: expert 3 is one of them. Expert 2 has no rows."""
    generator = torch.Generator().manual_seed(num_tokens)
    values = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    values[:, 2] = -1
    if is_skewed:
        values[:, 3] = 2
    ids = values.topk(2).indices.sort(dim=1).values
    return sort_by_expert(ids, NUM_EXPERTS)


def expert_operands(
    lanes: SumLanes, dtype: torch.dtype, num_tokens: int, num_columns: int = NUM_COLUMNS
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, lanes.width, generator=generator)
    shape = NUM_EXPERTS * num_columns, lanes.width
    weight = torch.randn(shape, generator=generator) * 0.05
    return x.to(dtype), weight.to(dtype)
