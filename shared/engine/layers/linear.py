from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import Weight, linear, pack_weight


class Linear(nn.Module):
    """y = x · weightᵀ + bias over x [T, in_features]. Parameters are initially unset.

    Once they are filled, `pack` replaces the weight by the form that the device computes with.
    """

    weight: Weight
    is_batch_invariant = True  # see kernels.ops.linear

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

    def pack(self) -> None:
        if isinstance(self.weight, Tensor):
            replace_weight(self, pack_weight(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, is_batch_invariant=self.is_batch_invariant)


def parameter_of(module: Any) -> Tensor:
    """A module's weight before `pack`, in the form that a checkpoint fills."""
    weight: Tensor = module.weight
    return weight


def replace_weight(module: Any, weight: Weight) -> None:
    """Replaces a module's weight parameter by `weight`."""
    del module.weight
    module.weight = weight
