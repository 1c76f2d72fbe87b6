"""The MLPs of experts in two launches: the reference's rows, with and without what all share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.gpu.moe.expert_mlp import NO_GATE, TILES, expert_mlp, tile_of
from kernels.reference.grouped_linear import expert_mlp as reference
from kernels.routing import ExpertWeights
from tests.kernels.support.expert_inputs import NUM_EXPERTS, expert_rows
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

HIDDEN, INNER = 72, 40


def weights_of(
    dtype: torch.dtype, device: torch.device, shared_inner: int, *, is_gelu: bool = False
) -> ExpertWeights:
    shapes = [(NUM_EXPERTS * 2 * INNER, HIDDEN), (NUM_EXPERTS * HIDDEN, INNER)]
    shapes += [(2 * shared_inner, HIDDEN), (HIDDEN, shared_inner)] if shared_inner else []
    made = [
        (random(*shape, like=device, dtype=torch.float32, seed=seed) * shape[1] ** -0.5).to(dtype)
        for seed, shape in enumerate(shapes)
    ]
    shared = (made[2], made[3]) if shared_inner else (None, None)
    return ExpertWeights(made[0], made[1], *shared, is_gelu)


@pytest.mark.parametrize(
    ("num_tokens", "shared_inner", "is_gelu", "has_factors"),
    [(70, 88, False, False), (1, 0, True, True), (1, 40, False, False), (33, 0, False, True)],
)
def test_rows_match_the_reference(
    num_tokens: int,
    shared_inner: int,
    is_gelu: bool,
    has_factors: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Experts without rows, and one with as many as there are tokens."""
    x = random(num_tokens, HIDDEN, like=device, dtype=dtype)
    weights = weights_of(dtype, device, shared_inner, is_gelu=is_gelu)
    rows = expert_rows(num_tokens, is_skewed=True)
    rows = type(rows)(*(each.to(device) for each in rows))
    factors = random(num_tokens, like=device, dtype=torch.float32, seed=9)
    options: dict[str, Any] = {"factors": factors} if has_factors else {}
    with poisoned_outputs():
        y, shared = expert_mlp(x, rows, weights, **options)
    expected, expected_shared = reference(x, rows, weights, **options)
    assert_near(y, expected.float())
    assert (shared is None) == (expected_shared is None) == (not shared_inner)
    if shared is not None and expected_shared is not None:
        assert_near(shared, expected_shared.float())


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    found = [tile_of(n, 128, torch.bfloat16).block_m for n in (1, 8, 512, 1024, 1152, 2048, 10**5)]
    assert found == [16, 16, 16, 16, 32, 32, 128]
    assert {tile_of(n, 8, torch.bfloat16) for n in range(1, 3000)} == set(TILES.values())


def test_wrong_weights_raise(device: torch.device) -> None:
    x = torch.ones(3, HIDDEN, device=device)
    rows = expert_rows(3)
    rows = type(rows)(*(each.to(device) for each in rows))
    weights = weights_of(torch.float32, device, 0)
    with pytest.raises(BadTensor, match="weight has shape"):
        expert_mlp(x[:, :64], rows, weights)
    with pytest.raises(BadTensor, match=r"weight is torch\.float16"):
        expert_mlp(x, rows, weights._replace(down=weights.down.half()))


def test_ops_use_this_kernel(device: torch.device) -> None:
    assert ops.expert_mlp.elsewhere is expert_mlp
    assert NO_GATE == 0
