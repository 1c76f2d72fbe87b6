"""A mixture of experts: each token passes through the few MLPs that its router chooses.

    y = Σ_e weight[e] · down_e(activation(gate_e(x)) · up_e(x)) + shared(x)

The GEMMs of all experts are one operation. The row of each chosen expert is rounded to the
model's dtype, then the rows of a token are added in FP32 in the order of expert ids, the shared
expert last, and rounded once: a token's bits depend neither on other tokens nor on where experts
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from kernels.ops import (
    NEVER,
    ExpertChoice,
    ExpertRows,
    ExpertWeights,
    QuantizedWeight,
    SumLanes,
    add_experts,
    can_compress_experts,
    clamped_gate,
    expert_mlp,
    gelu_and_mul,
    is_for_library,
    pack_experts,
    reason_against_grouped,
    sort_by_expert,
)
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import Linear, MatmulModule
from shared.engine.layers.methods.expert_method import (
    ExpertMethod,
    ExpertsState,
    choose_expert_method,
    expert_weights,
    reason_against_fusing,
)
from shared.engine.layers.mlp import GATES, GatedMlp
from shared.engine.layers.router import Router, zero_parameter
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.cuts import BLOCK, column_lanes, whole_blocks
from shared.engine.parallel.expert_part import expert_range
from shared.engine.parallel.lanes import NUM_LANES, rank_lanes
from shared.engine.parallel.mesh import LocalMesh, Mesh

# Above 512 tokens of 8 experts each: decode steps, which graphs repeat, have fewer. Where the
# library becomes the faster one is not measured.
LIBRARY_ROWS = 4096
_GATED = ("gate_proj", "up_proj")


class ExpertLinear(MatmulModule):
    """One weight of all experts, [E · N, K]; N and K are full blocks of 32."""

    method: ExpertMethod  # type: ignore[assignment]
    lanes: SumLanes

    def __init__(
        self, shape: tuple[int, int, int], lanes: SumLanes, share: float, *, dtype: torch.dtype
    ) -> None:
        """The weights have the shape E, N, K. A token uses the part `share` of the experts."""
        super().__init__()
        num_experts, num_columns, width = shape
        self.lanes = lanes
        self.share = share
        self.set_parameter(zero_parameter(num_experts * num_columns, width, dtype=dtype))
        self.is_compressible = can_compress_experts(self.parameter)

    def packed(self, weight: Tensor) -> Tensor | QuantizedWeight:
        if self.store is not None:
            return self.store.transcoded(weight, is_padded=True)
        return pack_experts(weight)

    def set_lanes(self, lanes: SumLanes) -> None:
        self.lanes = lanes
        self._choose()

    def stored(self, rows: Mapping[str, int], width: int) -> list[dict[str, Tensor]]:
        """Returns the tensors of the checkpoint's layers, by the ends of their names."""
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
        else:
            self.__dict__.pop("method", None)  # holds the dense weight


class Experts(nn.Module):
    """The MLPs of a layer's experts, or of those that a rank holds. Sizes are padded to full blocks
    of 32 with zeros.

    A rank holds whole experts or some inner columns of all; see expert_part.py. It has the rows of
    all tokens, so it computes those of its experts, and all ranks gather the rows of all: no token
    travels to an expert. Or all ranks add the sums of their columns.
    """

    adds: Mesh | None = None  # sums over lanes; None: the GEMM does
    gathers: Mesh | None = None  # rows of all ranks' experts
    num_sums = 1

    def __init__(self, config: ModelConfig, moe: MoeConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = moe
        self.held = range(*moe.held.experts)
        self.inner = moe.held.columns[1] - moe.held.columns[0]
        self.hidden = config.hidden_size
        self.gate = GATES[config.activation]
        self.clamped_gate = moe.clamped_gate
        num_held, inner, hidden = (
            len(self.held),
            whole_blocks(self.inner),
            whole_blocks(self.hidden),
        )
        share = moe.experts_per_token / moe.num_experts
        lanes = SumLanes.of((0, hidden)), SumLanes.of(column_lanes(inner))
        shapes = (num_held, 2 * inner, hidden), (num_held, hidden, inner)
        self.gate_up_proj = ExpertLinear(shapes[0], lanes[0], share, dtype=dtype)
        self.down_proj = ExpertLinear(shapes[1], lanes[1], share, dtype=dtype)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if self.clamped_gate is not None:
            self.gate_up_bias = zero_parameter(num_held, 2 * inner, dtype=dtype)
            self.down_bias = zero_parameter(num_held, hidden, dtype=dtype)

    def linears(self) -> list[tuple[ExpertLinear, dict[str, int], int]]:
        """Yields each weight with the checkpoint's layers that it consists of, one below the other:
        name -> output rows; and their columns.
        """
        inner, hidden = self.inner, self.hidden
        gate_up = {f"{e}.{name}": inner for e in self.held for name in _GATED}
        down = {f"{e}.down_proj": hidden for e in self.held}
        return [(self.gate_up_proj, gate_up, hidden), (self.down_proj, down, inner)]

    def destinations(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for linear, rows, width in self.linears():
            for name, tensors in zip(rows, linear.stored(rows, width), strict=True):
                found |= {f"{name}.{kind}": tensor for kind, tensor in tensors.items()}
        return found | self._bias_destinations()

    def _bias_destinations(self) -> dict[str, Tensor]:
        if self.gate_up_bias is None or self.down_bias is None:
            return {}
        found: dict[str, Tensor] = {}
        for expert, gate_up, down in zip(
            self.held, self.gate_up_bias.unflatten(1, (2, -1)), self.down_bias, strict=True
        ):
            for name, bias in zip(_GATED, gate_up, strict=True):
                found[f"{expert}.{name}.bias"] = bias[: self.inner]
            found[f"{expert}.down_proj.bias"] = down[: self.hidden]
        return found

    def join(self, mesh: Mesh) -> None:
        """The weights are one rank's part."""
        is_spread = len(self.held) < self.config.num_experts
        self.gathers = mesh if is_spread else None
        lanes = SumLanes.of(column_lanes(whole_blocks(self.config.intermediate_size)))
        if not is_spread:
            lanes = lanes.part(*own_lanes(mesh))
        self.down_proj.set_lanes(lanes)
        if not is_spread or mesh.exchange == "bf16":
            self.adds = LocalMesh(mesh.exchange) if is_spread else mesh
            num_lanes = NUM_LANES // self.adds.shape.tp
            self.num_sums = num_lanes if mesh.exchange == "bf16" else 1

    def forward(self, x: Tensor, choice: ExpertChoice, rows: ExpertRows) -> Tensor:
        """x [T, hidden] -> a row for each choice: [S, hidden], as `rows` orders them."""
        if self.gathers is None:
            return self._held_rows(x, choice, rows, 0, rows.offsets)
        tp = self.gathers.shape.tp
        ends = [expert_range(self.config.num_experts, rank, tp)[1] for rank in range(tp)]
        borders = [0, *rows.offsets[ends].tolist()]
        first = int(rows.offsets[self.held.start])
        offsets = rows.offsets[self.held.start : self.held.stop + 1] - first
        y = self._held_rows(x, choice, rows, first, offsets)
        return self.gathers.gather(y, 0, [end - low for low, end in pairwise(borders)])

    def _held_rows(
        self, x: Tensor, choice: ExpertChoice, rows: ExpertRows, first: int, offsets: Tensor
    ) -> Tensor:
        """Returns the rows of the experts held, from row `first` on; `offsets` are
        relative to it.
        """
        own = slice(first, first + int(offsets[-1])) if self.gathers else slice(None)
        tokens: Tensor | None = rows.tokens[own]
        assert tokens is not None
        if not len(tokens):
            return x.new_empty(0, x.shape[1])
        if self.config.routing.scales_input:
            factors = torch.empty_like(choice.weights).view(-1)
            factors[rows.places.view(-1)] = choice.weights.view(-1)
            scaled = x.index_select(0, tokens).float() * factors[own].unsqueeze(1)
            x, tokens = scaled.to(x.dtype), None
        gate_up = self.gate_up_proj(x, tokens, offsets)
        if self.clamped_gate is None or self.gate_up_bias is None or self.down_bias is None:
            return self._down(self.gate(gate_up), offsets)
        experts = torch.empty_like(rows.tokens)
        experts[rows.places.view(-1)] = choice.ids.view(-1) - self.held.start
        experts = experts[own]
        limits = {"limit": self.clamped_gate.limit, "alpha": self.clamped_gate.alpha}
        gated = clamped_gate(gate_up, self.gate_up_bias, experts, **limits)
        return self._down(gated, offsets) + self.down_bias.index_select(0, experts)

    def _down(self, gated: Tensor, offsets: Tensor) -> Tensor:
        if self.adds is None:
            return self.down_proj(gated, None, offsets)
        sums = self.down_proj.method.partials(gated, None, offsets, self.num_sums)
        return self.adds.add(sums, gated.dtype)


def own_lanes(mesh: Mesh) -> tuple[int, int]:
    """Returns the lanes [first, end) that this rank sums."""
    return rank_lanes(mesh.shape.place(mesh.rank)[1], mesh.shape.tp)


class MoeMlp(nn.Module):
    """A layer's router, experts and shared expert. Submodules have the checkpoints' names.

    In the fast mode experts and shared expert are computed together where they can: see
    methods/expert_method.py.

    `summed_offsets` [E + 1] int64: sums of `ExpertRows.offsets` of all steps, whose differences are
    the tokens of each expert. They are added where the rows are sorted, and nobody waits for them.
    """

    summed_offsets: Tensor
    is_batch_invariant = True
    library_rows = NEVER  # from which on torch's grouped GEMM computes

    def __init__(self, config: ModelConfig, moe: MoeConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = moe
        self.hidden_size = config.hidden_size
        offsets = torch.zeros(moe.num_experts + 1, dtype=torch.int64)
        self.register_buffer("summed_offsets", offsets, persistent=False)
        self.gate = Router(moe, config.hidden_size, dtype=dtype)
        self.experts = Experts(config, moe, dtype=dtype)
        self.shared_experts: GatedMlp | None = None
        if moe.shared_intermediate_size:
            first, end = moe.held.shared
            self.shared_experts = GatedMlp(config, end - first, dtype=dtype)

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self)

    def join(self, mesh: Mesh) -> None:
        self.experts.join(mesh)
        if self.shared_experts is not None:
            lanes = SumLanes.of(column_lanes(self.config.shared_intermediate_size))
            self.shared_experts.down_proj.join(mesh, lanes.part(*own_lanes(mesh)))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same shape."""
        missing = -self.hidden_size % BLOCK
        padded = nn.functional.pad(x, (0, missing)) if missing else x
        choice = self.gate(padded)
        rows = sort_by_expert(choice.ids, self.config.num_experts, self.summed_offsets)
        scales_input = self.config.routing.scales_input
        if self.is_batch_invariant or self.reason_against_fusing(x):
            y = self.experts(padded, choice, rows)
            shared = None if self.shared_experts is None else self.shared_experts(x)
        else:
            factors = choice.weights.view(-1) if scales_input else None
            y, shared = expert_mlp(
                padded, rows, self.weights(), factors=factors, library_rows=self.library_rows
            )
        weights = None if scales_input else choice.weights
        return add_experts(y, rows.places, weights, shared, self.hidden_size)

    def reason_against_fusing(self, x: Tensor) -> str:
        """Returns why experts and shared expert are computed apart for rows like x; empty if they
        are not.
        """
        mode = self.is_batch_invariant
        is_whole = self.experts.gathers is None and self.experts.adds is None
        state = ExpertsState(
            is_batch_invariant=mode,
            has_library=is_for_library(x, is_batch_invariant=mode),
            is_whole=is_whole and all(each.mesh is None for each in self._shared()),
            has_bias=any(each.bias is not None for each in self._shared()),
            has_clamped_gate=self.experts.clamped_gate is not None,
            scales_many_inputs=self.config.routing.scales_input
            and self.config.experts_per_token > 1,
            weights=self._dense(),
        )
        return reason_against_fusing(state)

    def use_library(self) -> str:
        """Lets torch's grouped GEMM compute many rows. Returns the reason if it cannot; empty: it
        does. Weights must have their final form.
        """
        weight = self.experts.gate_up_proj.weight
        if not isinstance(weight, Tensor):
            return "weights are not dense"
        reason = self.reason_against_fusing(weight)
        reason = reason or reason_against_grouped(self.weights(), self.config.num_experts)
        self.library_rows = NEVER if reason else LIBRARY_ROWS
        return reason

    def weights(self) -> ExpertWeights:
        """Returns those of `expert_mlp`, where nothing speaks against it."""
        return expert_weights(self._dense(), is_gelu=self.experts.gate is gelu_and_mul)

    def _dense(self) -> tuple[object, ...]:
        linears = self.experts.gate_up_proj, self.experts.down_proj, *self._shared()
        return tuple(each.weight for each in linears)

    def _shared(self) -> tuple[Linear, ...]:
        """Returns the shared expert's layers, if there is one."""
        shared = self.shared_experts
        return () if shared is None else (shared.gate_up_proj, shared.down_proj)
