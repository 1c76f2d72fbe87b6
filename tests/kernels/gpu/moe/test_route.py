"""The choice of experts equals PyTorch's, and does not depend on the other tokens."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from kernels.gpu.moe.route import route
from kernels.torch_ops.route import route as torch_route
from shared.engine.model_config.moe_config import Routing
from tests.support.kernels.inputs import poisoned_outputs, random

GROUPED = Routing(
    score="sigmoid",
    is_renormalised=True,
    has_choice_bias=True,
    num_groups=3,
    top_groups=2,
    scale=2.5,
)
ROUTINGS = {
    "softmax": (Routing(score="softmax"), 17),
    "renormalised softmax": (Routing(score="softmax", is_renormalised=True), 8),
    "sigmoid": (Routing(score="sigmoid", scales_input=True), 9),
    "biased groups": (GROUPED, 15),
    "groups of one": (replace(GROUPED, num_groups=8, top_groups=5), 8),
}
NAN = float("nan")


def operands(name: str, device: torch.device) -> tuple[Tensor, Tensor | None, Routing]:
    routing, num_experts = ROUTINGS[name]
    logits = random(33, num_experts + 5, like=device, dtype=torch.float32)[:, :num_experts]
    logits = logits * 3
    logits[1] = logits[1].round()  # equal ones
    logits[2, ::2] = 0.0
    logits[2, 1::2] = -0.0
    logits[3, 1], logits[4, 2], logits[5] = NAN, float("inf"), NAN
    logits[6, 0] = -float("inf")
    bias = random(num_experts, like=device, dtype=torch.float32, seed=1)
    return logits, bias if routing.has_choice_bias else None, routing


@pytest.mark.each_value
@pytest.mark.parametrize("num_chosen", [1, 5])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_is_that_of_the_library(name: str, num_chosen: int, device: torch.device) -> None:
    logits, bias, routing = operands(name, device)
    with poisoned_outputs():
        found = route(logits, bias, num_chosen, routing)
    expected = torch_route(logits.cpu(), None if bias is None else bias.cpu(), num_chosen, routing)
    assert torch.equal(found.ids.cpu(), expected.ids)
    torch.testing.assert_close(
        found.weights.cpu(), expected.weights, rtol=2e-6, atol=1e-7, equal_nan=True
    )


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_does_not_depend_on_other_tokens(name: str, device: torch.device) -> None:
    logits, bias, routing = operands(name, device)
    together = route(logits, bias, 2, routing)
    for row in (0, 7, 32):
        alone = route(logits[row : row + 1], bias, 2, routing)
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.weights[0], together.weights[row])
