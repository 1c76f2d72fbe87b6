"""First cases of the choice of experts. The reference is the library's, on the device."""

from __future__ import annotations

import torch

from kernels.gpu.moe import expert_rows as rows_of
from kernels.gpu.moe import route as choosing
from kernels.torch_ops import expert_rows as library_rows
from kernels.torch_ops import route as library
from shared.engine.model_config.moe_config import Routing
from tests.kernels.gpu.first.case import Inputs, Steps, cases

CHOSEN = 8
ROUTINGS = {
    "one group": (Routing(score="softmax", is_renormalised=True), 128),
    "groups": (
        Routing(score="sigmoid", is_renormalised=True, num_groups=8, top_groups=4, scale=2.5),
        256,
    ),
}


def route(inputs: Inputs, routing: str) -> Steps:
    """The experts of DeepSeek-V3, whose bias they have, and of Qwen3-30B-A3B."""
    form, num = ROUTINGS[routing]
    logits = inputs.random(inputs.sizes.rows["batch"], num, dtype=torch.float32)
    bias = inputs.random(num, dtype=torch.float32, seed=1) if form.num_groups > 1 else None
    found = choosing.route(logits, bias, CHOSEN, form)
    yield
    expected = library.route(logits, bias, CHOSEN, form)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)


def expert_rows(inputs: Inputs, rows: str) -> Steps:
    """Sorted by expert, and added again."""
    num_tokens, num = inputs.sizes.rows[rows], inputs.sizes.experts["num"]
    of_token, hidden = inputs.sizes.experts["of_token"], inputs.sizes.experts["hidden"]
    scores = inputs.random(num_tokens, num, dtype=torch.float32)
    ids = scores.topk(of_token).indices.sort(dim=1).values.contiguous()
    y = inputs.random(num_tokens * of_token, hidden, seed=1)
    weights = inputs.random(num_tokens, of_token, dtype=torch.float32, seed=2)
    found = rows_of.sort_by_expert(ids, num)
    expected = library_rows.sort_by_expert(ids, num)
    total = rows_of.add_experts(y, expected.places, weights, None, hidden)
    yield
    assert all(map(torch.equal, found, expected))
    assert torch.equal(total, library_rows.add_experts(y, expected.places, weights, None, hidden))


CASES = [
    *cases(route, routing=tuple(ROUTINGS)),
    *cases(expert_rows, rows=("batch", "chunk")),
]
