"""The choice of experts of each token."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from kernels.ops import ExpertChoice, has_wide_library, narrowed, route, wide_linear
from shared.engine.layers.linear import MatmulModule
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.cuts import whole_blocks

ALIGNMENT = 64  # bytes, as torch's


class Router(MatmulModule):
    """Logits in FP32 from weights in FP32, summed in an order that no other token changes.

    The weight [E, K] has rows and columns of zeros up to full blocks. `narrow` is the weight in the
    model's dtype, where the fast mode may multiply with it and nothing is lost.
    """

    narrow: Tensor | None

    def __init__(self, config: MoeConfig, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("narrow", None, persistent=False)
        self.config = config
        self.hidden_size = hidden_size
        shape = whole_blocks(config.num_experts), whole_blocks(hidden_size)
        self.set_parameter(zero_parameter(*shape, dtype=torch.float32))
        self.logit_bias: nn.Parameter | None = None
        if config.routing.has_bias:
            self.logit_bias = zero_parameter(config.num_experts, dtype=torch.float32)
        self.bias: nn.Parameter | None = None
        if config.routing.has_choice_bias:
            self.bias = zero_parameter(config.num_experts, dtype=torch.float32)

    def destinations(self) -> dict[str, Tensor]:
        weight = self.parameter[: self.config.num_experts, : self.hidden_size]
        found = {"weight": weight, "bias": self.logit_bias, "e_score_correction_bias": self.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def pack(self) -> None:
        super().pack()
        if isinstance(self.weight, Tensor):
            self.narrow = narrowed(self.weight, self.dtype)

    def forward(self, x: Tensor) -> ExpertChoice:
        """x [T, K], of full blocks."""
        logits = self._logits(x)[:, : self.config.num_experts]
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        routing = self.config.routing
        return route(logits, self.bias, self.config.experts_per_token, routing)

    def _logits(self, x: Tensor) -> Tensor:
        is_exact = self.is_batch_invariant
        if self.narrow is None or not has_wide_library(x, is_batch_invariant=is_exact):
            return self.method(x.float())
        return wide_linear(x, self.narrow, is_batch_invariant=is_exact)


def zero_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(_zeros(shape, dtype), requires_grad=False)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros. CPU memory takes pages only when it is written: a model is built before its
    weights are mapped, and zeros of all experts are as large as the dense model.
    """
    if torch.get_default_device().type != "cpu":
        return torch.zeros(shape, dtype=dtype)
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)
