"""The description of a mixture of experts. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class Routing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The choice and weights of a token's experts; the formula is in `kernels/routing.py`.

    Experts come from at most `top_groups` of `num_groups`. If it `has_choice_bias`, each expert's
    score has a bias, for the choice alone; if it `has_bias`, each logit has one. If
    `is_renormalised`, the weights' sum is 1, before `scale`. If it `scales_input`, the weight
    scales an expert's input, and its output has none.
    """

    score: Literal["softmax", "sigmoid"]
    is_renormalised: bool = False
    has_choice_bias: bool = False
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    scales_input: bool = False


class ClampedGate(msgspec.Struct, frozen=True, kw_only=True):
    """The gate of experts whose projections have biases; see kernels.reference.gated."""

    limit: float
    alpha: float


class ExpertPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one rank: [first, end) of the experts, of the inner columns of each of them, and
    of the columns of the shared expert.
    """

    experts: tuple[int, int]
    columns: tuple[int, int]
    shared: tuple[int, int]


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mixture of experts. `intermediate_size` is that of one expert, `shared_intermediate_size`
    that of the MLP which every token uses beside its experts; 0: none. `part` is set on a rank that
    does not hold all of them.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    routing: Routing
    shared_intermediate_size: int = 0
    clamped_gate: ClampedGate | None = None  # instead of the model's; projections have biases
    part: ExpertPart | None = None

    @property
    def held(self) -> ExpertPart:
        """All, if it is not one rank's part."""
        return self.part or ExpertPart(
            experts=(0, self.num_experts),
            columns=(0, self.intermediate_size),
            shared=(0, self.shared_intermediate_size),
        )
