"""A mixture of experts: each token passes through the few MLPs that its router chooses.

    y = Σ_e weight[e] · down_e(activation(gate_e(x)) · up_e(x)) + shared(x)

The products of all experts are one operation. The row of each chosen expert is rounded to the
model's dtype, then the rows of a token are added in FP32 in the order of expert ids, the shared
expert last, and rounded once: a token's bits depend neither on other tokens nor on where experts
are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kernels.ops import (
    Choice,
    ExpertRows,
    QuantisedWeight,
    SumLanes,
    add_experts,
    can_compress_experts,
    pack_experts,
    sort_by_expert,
)
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import ProductModule
from shared.engine.layers.methods.expert_method import ExpertMethod, choose_expert_method
from shared.engine.layers.mlp import GATES, GatedMlp
from shared.engine.layers.router import Router, zero_parameter
from shared.engine.model_config import ModelConfig
from shared.engine.moe_config import MoeConfig
from shared.engine.parallel.cuts import BLOCK, column_lanes, whole_blocks
from shared.engine.parallel.lanes import NUM_LANES
from shared.engine.parallel.mesh import Mesh

_GATED = ("gate_proj", "up_proj")


class ExpertLinear(ProductModule):
    """One weight of all experts, [E · N, K]; N and K are full blocks of 32."""

    method: ExpertMethod  # type: ignore[assignment]
    lanes: SumLanes

    def __init__(
        self, shape: tuple[int, int, int], lanes: SumLanes, share: float, *, dtype: torch.dtype
    ) -> None:
        """`shape`: E, N, K. `share`: the part of the experts that a token uses."""
        super().__init__()
        num_experts, num_columns, width = shape
        self.lanes = lanes
        self.share = share
        self.set_parameter(zero_parameter(num_experts * num_columns, width, dtype=dtype))
        self.is_compressible = can_compress_experts(self.parameter)

    def packed(self, weight: Tensor) -> Tensor | QuantisedWeight:
        if self.store is not None:
            return self.store.transcoded(weight, is_padded=True)
        return pack_experts(weight)

    def stored(self, rows: Mapping[str, int], width: int) -> list[dict[str, Tensor]]:
        """The tensors of the checkpoint's layers, by the ends of their names."""
        if self.store is not None:
            return self.store.parts(self.parameter)
        dense = self.parameter.unflatten(0, (len(rows), -1))
        return [
            {"weight": each[:num_rows, :width]}
            for each, num_rows in zip(dense, rows.values(), strict=True)
        ]

    def forward(self, x: Tensor, rows: Tensor | None, offsets: Tensor) -> Tensor:
        return self.method(x, rows, offsets)

    def _choose(self) -> None:
        if self.store is None or not isinstance(self.weight, Tensor):
            self.method = choose_expert_method(self.weight, self.lanes)


class Experts(nn.Module):
    """The MLPs of a layer's experts. Sizes are padded to full blocks of 32 with zeros."""

    mesh: Mesh | None = None
    num_sums = 1

    def __init__(self, config: ModelConfig, moe: MoeConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = moe.num_experts, moe.intermediate_size, config.hidden_size
        inner, hidden = whole_blocks(moe.intermediate_size), whole_blocks(config.hidden_size)
        self.blocks = moe.num_experts, inner, hidden
        self.scales_input = moe.routing.scales_input
        self.gate = GATES[config.activation]
        share = moe.experts_per_token / moe.num_experts
        lanes = SumLanes.of((0, hidden)), SumLanes.of(column_lanes(inner))
        shapes = (moe.num_experts, 2 * inner, hidden), (moe.num_experts, hidden, inner)
        self.gate_up_proj = ExpertLinear(shapes[0], lanes[0], share, dtype=dtype)
        self.down_proj = ExpertLinear(shapes[1], lanes[1], share, dtype=dtype)

    def linears(self) -> list[tuple[ExpertLinear, dict[str, int], int]]:
        """Each weight with the checkpoint's layers that it consists of, one below the other: name
        -> output rows; and their columns.
        """
        num_experts, inner, hidden = self.sizes
        gate_up = {f"{e}.{name}": inner for e in range(num_experts) for name in _GATED}
        down = {f"{e}.down_proj": hidden for e in range(num_experts)}
        return [(self.gate_up_proj, gate_up, hidden), (self.down_proj, down, inner)]

    def destinations(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for linear, rows, width in self.linears():
            for name, tensors in zip(rows, linear.stored(rows, width), strict=True):
                found |= {f"{name}.{kind}": tensor for kind, tensor in tensors.items()}
        return found

    def join(self, mesh: Mesh) -> None:
        """The mesh adds the sums of the down product."""
        self.mesh = mesh
        self.num_sums = NUM_LANES // mesh.shape.tp if mesh.exchange == "bf16" else 1

    def forward(self, x: Tensor, choice: Choice, rows: ExpertRows) -> Tensor:
        """x [T, hidden] -> a row for each choice: [S, hidden], as `rows` orders them."""
        tokens: Tensor | None = rows.tokens
        if self.scales_input:
            own = x.index_select(0, rows.tokens).float()
            factors = torch.empty_like(choice.weights).view(-1)
            factors[rows.places.view(-1)] = choice.weights.view(-1)
            x, tokens = (own * factors.unsqueeze(1)).to(x.dtype), None
        gated = self.gate(self.gate_up_proj(x, tokens, rows.offsets))
        if self.mesh is None:
            return self.down_proj(gated, None, rows.offsets)
        sums = self.down_proj.method.partials(gated, None, rows.offsets, self.num_sums)
        return self.mesh.add(sums, x.dtype)


class MoeMlp(nn.Module):
    """A layer's router, experts and shared expert. Submodules have the checkpoints' names."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = moe
        self.hidden_size = config.hidden_size
        self.gate = Router(moe, config.hidden_size)
        self.experts = Experts(config, moe, dtype=dtype)
        self.shared_experts: GatedMlp | None = None
        if moe.shared_intermediate_size:
            self.shared_experts = GatedMlp(config, moe.shared_intermediate_size, dtype=dtype)

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self)

    def join(self, mesh: Mesh) -> None:
        self.experts.join(mesh)
        if self.shared_experts is not None:
            down = self.shared_experts.down_proj
            assert down.lanes is not None
            down.join(mesh, down.lanes)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same shape."""
        missing = -self.hidden_size % BLOCK
        padded = nn.functional.pad(x, (0, missing)) if missing else x
        choice = self.gate(padded)
        rows = sort_by_expert(choice.ids, self.config.num_experts)
        y = self.experts(padded, choice, rows)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        weights = None if self.config.routing.scales_input else choice.weights
        return add_experts(y, rows.places, weights, shared, self.hidden_size)
