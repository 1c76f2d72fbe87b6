from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.torch_ops.top_k import top_k

INFINITY = float("inf")


def _oracle(x: Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in x.tolist()]


@pytest.mark.parametrize("k", [0, 1, 3, 20, 63])
@pytest.mark.parametrize("num_columns", [1, 63, 1000])
def test_largest_values_are_ordered_by_value_then_index(num_columns: int, k: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    # few distinct values of both signs: ties everywhere
    x = torch.randint(-9, 10, (7, num_columns), generator=generator) / 8.0
    assert top_k(x, k).tolist() == _oracle(x, k)


def test_close_values_are_distinguished() -> None:
    x = torch.tensor([[-1.0, -1.0 + 2**-24, -1e-45, -0.0, 0.0, -3e38, -INFINITY, 1e-45, 5.0]])
    assert top_k(x, 9).tolist() == [[8, 7, 3, 4, 2, 1, 0, 5, 6]]


def test_infinities_tie_by_index() -> None:
    x = torch.full((1, 6), -INFINITY)
    x[0, 4] = -2.0
    assert top_k(x, 4).tolist() == [[4, 0, 1, 2]]


def test_input_is_unchanged() -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    top_k(x, 5)
    assert torch.equal(x, before)
