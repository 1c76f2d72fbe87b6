"""Rows by expert, and their weighted sums, of the library's bits."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.moe.expert_rows import add_experts, sort_by_expert
from kernels.torch_ops import expert_rows as library
from tests.support.kernels.inputs import poisoned_outputs, random


@pytest.mark.parametrize("num_tokens", [33, 700, 1])
def test_rows_are_those_of_the_library(num_tokens: int, device: torch.device) -> None:
    """More tokens than one program reads at a time; experts without a token."""
    scores = random(num_tokens, 7, like=device, dtype=torch.float32)
    ids = scores.topk(3).indices.sort(dim=1).values
    sums = torch.arange(10, device=device)
    with poisoned_outputs():
        found = sort_by_expert(ids, 9, sums)
    for tensor, expected in zip(found, library.sort_by_expert(ids.cpu(), 9), strict=True):
        assert torch.equal(tensor.cpu(), expected)
    assert torch.equal(sums, torch.arange(10, device=device) + found.offsets)


@pytest.mark.parametrize("num_tokens", [9, 1])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
def test_sums_have_the_bits_of_the_library(
    num_tokens: int, is_weighted: bool, has_shared: bool, dtype: torch.dtype, device: torch.device
) -> None:
    y = random(3 * num_tokens, 1120, like=device, dtype=dtype)
    places = torch.randperm(3 * num_tokens).view(num_tokens, 3).to(device)
    weights = random(num_tokens, 3, like=device, dtype=torch.float32, seed=1)
    shared = random(num_tokens, 1100, like=device, dtype=dtype, seed=2)
    operands = places, weights if is_weighted else None, shared if has_shared else None
    with poisoned_outputs():
        found = add_experts(y, *operands, 1100)
    assert torch.equal(found, library.add_experts(y, *operands, 1100))
