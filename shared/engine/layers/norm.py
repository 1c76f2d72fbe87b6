from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ops import add_rms_norm, layer_norm, rms_norm
from shared.engine.layers.linear import unset_parameter
from shared.engine.model_config.model_config import ModelConfig


class RMSNorm(nn.Module):
    """RMS norm. A norm without a weight multiplies by ones, which no checkpoint fills."""

    weight: Tensor

    def __init__(
        self, size: int, config: ModelConfig, *, dtype: torch.dtype, has_weight: bool = True
    ) -> None:
        super().__init__()
        if has_weight:
            self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        else:
            self.register_buffer("weight", torch.ones(size, dtype=dtype), persistent=False)
        self.has_weight = has_weight
        self.eps = config.rms_norm_eps
        self.mode = {
            "has_unit_offset": config.has_unit_offset_norms,
            "is_rounded_once": config.has_norms_rounded_once,
        }

    def destinations(self) -> dict[str, Tensor]:
        return {"weight": self.weight} if self.has_weight else {}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, **self.mode)

    def of_sum(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + update, and the sum; with update None those of x."""
        if update is None:
            return self(x), x
        return add_rms_norm(x, update, self.weight, self.eps, **self.mode)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unset_parameter(size, dtype=dtype)
        self.bias = unset_parameter(size, dtype=dtype)
        self.eps = eps

    def destinations(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
