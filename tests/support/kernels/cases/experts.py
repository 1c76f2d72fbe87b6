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
from tests.support.kernels.cases.sizes import MIXTRAL, QWEN3
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


def expert_mlp(inputs: Inputs, mixture: str, rows: str) -> Results:
    """With an MLP of two experts' size that all tokens share, as DeepSeek-V2-Lite's."""
    own, num_tokens = inputs.sizes.mixtures[mixture], inputs.sizes.rows[rows]
    scores = inputs.random(num_tokens, own.num_experts, dtype=torch.float32)
    ids = scores.topk(own.num_chosen).indices.sort(dim=1).values.contiguous()
    shapes = [own.weight_shape(each) for each in ("gate_up", "down")]
    experts = [inputs.weight((own.num_experts * n, k), seed=k) for n, k in shapes]
    shared = [inputs.weight((4 * own.inner, own.hidden), seed=3)]
    shared.append(inputs.weight((own.hidden, 2 * own.inner), seed=4))
    given = (
        inputs.random(num_tokens, own.hidden, seed=5),
        library_rows.sort_by_expert(ids, own.num_experts),
        ExpertWeights(experts[0], experts[1], shared[0], shared[1], is_gelu=False),
    )
    y, of_all = mlps.by_triton(*given)
    assert of_all is not None

    def wanted_of_all() -> Tensor:
        found = reference_mlp(*given)[1]
        assert found is not None
        return found.float()

    return (
        Result(y, lambda: reference_mlp(*given)[0].float()),
        Result(of_all, wanted_of_all),
    )


CASES = [
    *cases(route, routing=tuple(ROUTINGS)),
    *cases(expert_rows, mixture=(QWEN3,), rows=("batch", "chunk")),
    *cases(expert_rows, mixture=(MIXTRAL,), rows=("batch",)),
    *cases(expert_mlp, mixture=(QWEN3,), rows=("one", "batch", "chunk")),
]
