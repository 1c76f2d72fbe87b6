"""MXFP4 of experts that a checkpoint has in one tensor, as gpt-oss's published files have it.

A tensor of factors on the right of x, [E, K, N], becomes rows: `_blocks` [E, N, K / 32, 16], two
codes a byte, and `_scales` [E, N, K / 32]. A scale is that of OCP's Microscaling specification 1.0:
the exponent of the largest magnitude, less 2; a code is the nearest, the even one of two.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from shared.engine.model_config.formats import Mxfp4, TensorSpec, num_groups
from shared.engine.quantize.round_to_nearest import read_numbers
from shared.engine.weights.load import CheckpointTensors
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError, ConfigError

GROUP = Mxfp4().group
_EXPERTS = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)")
_LARGEST_EXPONENT = 2  # of E2M1: its largest number is 1.5 · 2^2
_BIAS = 127
# A magnitude's code is the number of these that it exceeds, or also reaches.
_EXCEEDED, _REACHED = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
DENSE = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
CONFIG: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": DENSE}


class StackedMxfp4:
    """The tensors of a checkpoint as they are written, with its experts in MXFP4."""

    def __init__(self, tensors: CheckpointTensors) -> None:
        """Raises ConfigError if no tensor has the experts of a layer."""
        self.tensors = tensors
        names = tensors.names()
        self.layers = [
            name for name in names if _EXPERTS.fullmatch(name) and self._is_stacked(name)
        ]
        if not self.layers:
            raise ConfigError(
                "mxfp4 is for the experts of gpt-oss, which are one tensor a layer; other models: "
                "--format int4 or fp8"
            )

    def described(self, name: str) -> dict[str, TensorSpec]:
        """Returns what the tensor `name` becomes, in the order of `content`. Raises
        CheckpointError.
        """
        dtype, shape = self.tensors.info(name)
        if name not in self.layers:
            return {name: TensorSpec(dtype, shape)}
        num_experts, width, num_rows = shape
        try:
            groups = num_experts, num_rows, num_groups(Mxfp4(), width)
        except CheckpointError as error:
            raise CheckpointError(f"{self.tensors.path(name)}: {name}: {error.message}") from None
        return {
            f"{name}_blocks": TensorSpec("U8", (*groups, GROUP // 2)),
            f"{name}_scales": TensorSpec("U8", groups),
        }

    def content(self, name: str) -> list[Tensor]:
        if name not in self.layers:
            return [read_tensor(self.tensors, name)]
        tensor = read_numbers(self.tensors, name)
        blocks, scales = zip(*(mxfp4(expert.T) for expert in tensor), strict=True)
        return [torch.stack(blocks), torch.stack(scales)]

    def _is_stacked(self, name: str) -> bool:
        return len(self.tensors.info(name).shape) == 3


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> blocks [N, K / 32, 16] and scales [N, K / 32], uint8."""
    grouped = weight.float().reshape(len(weight), -1, GROUP)
    largest = grouped.abs().amax(2)
    exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT  # frexp: [0.5, 1)
    exponents = torch.where(largest > 0, exponents, 0).clamp(-_BIAS, _BIAS)
    magnitudes = torch.ldexp(grouped.abs(), -exponents.unsqueeze(2))
    codes = torch.zeros(grouped.shape, dtype=torch.uint8)
    for limit in _EXCEEDED:
        codes += magnitudes > limit
    for limit in _REACHED:
        codes += magnitudes >= limit
    codes |= (grouped < 0).to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + _BIAS).to(torch.uint8)
