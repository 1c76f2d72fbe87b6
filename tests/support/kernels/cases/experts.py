"""The choice of experts. The reference is the library's, on the device."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gpu.moe import expert_mlp as mlps
from kernels.gpu.moe import expert_rows as rows_of
from kernels.gpu.moe import route as choosing
from kernels.reference.grouped_linear import expert_mlp as reference_mlp
from kernels.routing import ExpertWeights
from kernels.torch_ops import expert_rows as library_rows
from kernels.torch_ops import route as library
from tests.support.kernels.cases.case import Inputs, Result, Results, cases
from tests.support.kernels.cases.sizes import MIXTRAL, QWEN3, Mixture
from tests.support.kernels.tolerance import assert_equal


class Routing(NamedTuple):
    """A machine with Triton alone has no `moe_config.Routing`."""

    score: str
    is_renormalised: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


# Qwen3-30B-A3B's, Mixtral's, and DeepSeek-V3's: the experts of each, and how many a token chooses
ROUTINGS = {
    "one group": (Routing("softmax"), 128, 8),
    "few experts": (Routing("softmax"), 8, 2),
    "groups": (Routing("sigmoid", num_groups=8, top_groups=4, scale=2.5), 256, 8),
}
assert_weights = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-7)


def route(inputs: Inputs, routing: str) -> Results:
    """DeepSeek-V3's experts have a bias."""
    form, num_experts, num_chosen = ROUTINGS[routing]
    logits = inputs.random(inputs.sizes.rows["batch"], num_experts, dtype=torch.float32)
    bias = inputs.random(num_experts, dtype=torch.float32, seed=1) if form.num_groups > 1 else None
    given = logits, bias, num_chosen, form
    found = choosing.route(*given)
    return (
        Result(found.ids, lambda: library.route(*given).ids, assert_equal),
        Result(found.weights, lambda: library.route(*given).weights, assert_weights),
    )


def expert_rows(inputs: Inputs, mixture: str, rows: str) -> Results:
    """Sorted by expert, and added again."""
    own, num_tokens = inputs.sizes.mixtures[mixture], inputs.sizes.rows[rows]
    scores = inputs.random(num_tokens, own.num_experts, dtype=torch.float32)
    ids = scores.topk(own.num_chosen).indices.sort(dim=1).values.contiguous()
    y = inputs.random(num_tokens * own.num_chosen, own.hidden, seed=1)
    weights = inputs.random(num_tokens, own.num_chosen, dtype=torch.float32, seed=2)
    found = rows_of.sort_by_expert(ids, own.num_experts)
    expected = library_rows.sort_by_expert(ids, own.num_experts)
    given = y, expected.places, weights, None, own.hidden
    total = rows_of.add_experts(*given)
    sorted_rows = zip(found, expected, strict=True)
    return (
        *(Result(each, lambda wanted=wanted: wanted, assert_equal) for each, wanted in sorted_rows),
        Result(total, lambda: library_rows.add_experts(*given), assert_equal),
    )


def expert_mlp(inputs: Inputs, mixture: str) -> Results:
    """With an MLP of two experts' size that all tokens share, as DeepSeek-V2-Lite's: of few rows,
    and of many.
    """
    own = inputs.sizes.mixtures[mixture]
    (wide, hidden), (deep, inner) = (own.weight_shape(each) for each in ("gate_up", "down"))
    weights = ExpertWeights(
        gate_up=inputs.weight((own.num_experts * wide, hidden)),
        down=inputs.weight((own.num_experts * deep, inner), seed=2),
        shared_gate_up=inputs.weight((2 * wide, hidden), seed=3),
        shared_down=inputs.weight((deep, 2 * inner), seed=4),
        is_gelu=False,
    )
    results = (_expert_mlp(inputs, own, weights, inputs.sizes.rows[n]) for n in ("one", "chunk"))
    return tuple(each for found in results for each in found)


def _expert_mlp(
    inputs: Inputs, own: Mixture, weights: ExpertWeights, num_tokens: int
) -> tuple[Result, Result]:
    scores = inputs.random(num_tokens, own.num_experts, dtype=torch.float32)
    ids = scores.topk(own.num_chosen).indices.sort(dim=1).values.contiguous()
    rows = library_rows.sort_by_expert(ids, own.num_experts)
    given = inputs.random(num_tokens, own.hidden, seed=5), rows, weights
    y, shared = mlps.by_triton(*given)
    assert shared is not None

    def wanted(part: int) -> Tensor:
        found = reference_mlp(*given)[part]
        assert found is not None
        return found.float()

    return Result(y, lambda: wanted(0)), Result(shared, lambda: wanted(1))


CASES = [
    *cases(route, routing=tuple(ROUTINGS)),
    *cases(expert_rows, mixture=(QWEN3,), rows=("batch", "chunk")),
    *cases(expert_rows, mixture=(MIXTRAL,), rows=("batch",)),
    *cases(expert_mlp, mixture=(QWEN3,)),
]
