"""The choice of experts on CPUs equals PyTorch's; the formula is checked beside plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu.moe.route import route
from kernels.routing import ExpertChoice
from kernels.torch_ops.route import route as torch_route
from shared.engine.model_config.moe_config import Routing
from tests.kernels.support.compiled_first import compile_experts_first

ROUTINGS = {
    "softmax": Routing(score="softmax"),
    "renormalised softmax": Routing(score="softmax", is_renormalised=True),
    "sigmoid": Routing(score="sigmoid", scales_input=True),
    "biased groups": Routing(
        score="sigmoid",
        is_renormalised=True,
        has_choice_bias=True,
        num_groups=4,
        top_groups=2,
        scale=2.5,
    ),
    "groups of one": Routing(score="sigmoid", num_groups=8, top_groups=5, has_choice_bias=True),
}
BACKENDS = {"compiled": route, "torch": torch_route}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_experts_first()


@pytest.fixture(params=BACKENDS)
def choose(request: pytest.FixtureRequest) -> object:
    return BACKENDS[request.param]


def inputs(num_tokens: int, num_experts: int, routing: Routing) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 3
    bias = torch.randn(num_experts, generator=generator) if routing.has_choice_bias else None
    return logits, bias


def plainly(
    logits: list[float], bias: list[float] | None, k: int, routing: Routing
) -> ExpertChoice:
    largest = max(logits)
    if routing.score == "softmax":
        powers = [math.exp(each - largest) for each in logits]
        scores = [each / sum(powers) for each in powers]
    else:
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    values = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(values) // routing.num_groups
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    sums = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(len(groups)), key=lambda group: -sums[group])[: routing.top_groups]
    eligible = [index for index in range(len(values)) if index // size in best]
    ids = sorted(sorted(eligible, key=lambda index: -values[index])[:k])
    weights = [scores[index] for index in ids]
    if routing.is_renormalised:
        weights = [each / sum(weights) for each in weights]
    return ExpertChoice(torch.tensor(ids), torch.tensor([each * routing.scale for each in weights]))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_chosen", [1, 2, 5])
def test_choice_follows_the_formula(choose: object, name: str, num_chosen: int) -> None:
    routing = ROUTINGS[name]
    num_experts = 16 if routing.num_groups == 4 else 8
    logits, bias = inputs(70, num_experts, routing)
    found = choose(logits, bias, num_chosen, routing)  # type: ignore[operator]
    biases = None if bias is None else bias.tolist()
    for row in range(70):
        expected = plainly(logits[row].tolist(), biases, num_chosen, routing)
        assert torch.equal(found.ids[row], expected.ids)
        assert torch.allclose(found.weights[row], expected.weights, rtol=2e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_equal_experts_the_lowest_ids_are_chosen(choose: object, name: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = torch.ones(3, 8), torch.zeros(8) if routing.has_choice_bias else None
    found = choose(logits, bias, 2, routing)  # type: ignore[operator]
    assert found.ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logit_makes_one_token_nan(choose: object, name: str, bad: float) -> None:
    routing = ROUTINGS[name]
    logits, bias = inputs(3, 8, routing)
    expected = choose(logits, bias, 2, routing)  # type: ignore[operator]
    logits[1, 4] = bad
    found = choose(logits, bias, 2, routing)  # type: ignore[operator]
    assert found.weights[1].isnan().all()
    assert len(set(found.ids[1].tolist())) == 2
    assert found.ids.min() >= 0
    assert found.ids.max() < 8
    for row in (0, 2):
        assert torch.equal(found.ids[row], expected.ids[row])
        assert torch.equal(found.weights[row], expected.weights[row])


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_does_not_depend_on_other_tokens(choose: object, name: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = inputs(130, 8, routing)
    together = choose(logits, bias, 2, routing)  # type: ignore[operator]
    for rows in (slice(0, 1), slice(60, 67), slice(129, 130)):
        alone = choose(logits[rows].contiguous(), bias, 2, routing)  # type: ignore[operator]
        assert torch.equal(alone.ids, together.ids[rows])
        assert torch.equal(alone.weights, together.weights[rows])
