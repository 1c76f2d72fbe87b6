"""Rows by expert, and their weighted sums, on CPUs as in PyTorch."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.moe import expert_rows as compiled
from kernels.torch_ops import expert_rows as by_torch
from tests.kernels.support.compiled_first import compile_experts_first
from tests.support.kernels.inputs import poisoned_outputs


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_experts_first()


@pytest.mark.parametrize("num_tokens", [1, 33, 70])
def test_rows_are_sorted_by_expert_and_token(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, 7, generator=generator).topk(3).indices.sort(dim=1).values
    for sort in (compiled.sort_by_expert, by_torch.sort_by_expert):
        sums = torch.arange(10)
        with poisoned_outputs():
            found = sort(ids, 9, sums)
        chosen = [(e, t) for t, row in enumerate(ids.tolist()) for e in row]
        assert found.tokens.tolist() == [token for _, token in sorted(chosen)]
        counts = [sum(e < bound for e, _ in chosen) for bound in range(10)]
        assert found.offsets.tolist() == counts
        assert (sums - torch.arange(10)).tolist() == counts
        expected = [
            [sorted(chosen).index((e, t)) for e in row] for t, row in enumerate(ids.tolist())
        ]
        assert found.places.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
def test_rows_of_a_token_are_added_in_order(
    dtype: torch.dtype, num_tokens: int, is_weighted: bool, has_shared: bool
) -> None:
    """In FP32, one after the other, rounded once; columns of padding are left out."""
    generator = torch.Generator().manual_seed(num_tokens)
    y = torch.randn(3 * num_tokens, 96, generator=generator).to(dtype)
    places = torch.randperm(3 * num_tokens, generator=generator).view(num_tokens, 3)
    weights = torch.rand(num_tokens, 3, generator=generator) if is_weighted else None
    shared = torch.randn(num_tokens, 70, generator=generator).to(dtype) if has_shared else None
    with poisoned_outputs():
        found = compiled.add_experts(y, places, weights, shared, 70)
    total = torch.zeros(num_tokens, 70)
    for slot in range(3):
        factor = 1.0 if weights is None else weights[:, slot : slot + 1]
        total = total + y[places[:, slot], :70].float() * factor
    expected = (total if shared is None else total + shared.float()).to(dtype)
    assert torch.equal(found, expected)
    assert torch.equal(by_torch.add_experts(y, places, weights, shared, 70), expected)
