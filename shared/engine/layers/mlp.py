from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ops import gelu_and_mul, silu_and_mul
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import Linear
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.cuts import column_lanes

GATES = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}


class GatedMlp(nn.Module):
    """down(activation(gate(x)) · up(x)), with gate and up in one GEMM."""

    def __init__(
        self, config: ModelConfig, inner: int | None = None, *, dtype: torch.dtype
    ) -> None:
        """The intermediate size is `inner`, by default the model's."""
        super().__init__()
        hidden, has_bias = config.hidden_size, config.has_mlp_bias
        inner = config.intermediate_size if inner is None else inner
        self.gate_up_proj = Linear(hidden, 2 * inner, has_bias=has_bias, dtype=dtype)
        lanes = column_lanes(inner)
        self.down_proj = Linear(inner, hidden, has_bias=has_bias, dtype=dtype, lane_borders=lanes)
        self.activation = config.activation
        self.gate = GATES[config.activation]
        parts = {"gate_proj": inner, "up_proj": inner}
        self.parts = {} if config.has_fused_projections else {"gate_up_proj": parts}

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self, self.parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate(self.gate_up_proj(x)))
