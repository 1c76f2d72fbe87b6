from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.sampling.top_k import top_k
from kernels.torch_ops.top_k import top_k as reference_top_k
from tests.support.kernels.inputs import poisoned_outputs, random

WIDTHS = [63, 1000, 1] + ([] if IS_INTERPRETED else [32_000, 128_256])


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.gpu.sampling.top_k.PIECE", 256)


@pytest.mark.parametrize("k", [20, 63, 1, 0])
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_largest_values_are_ordered_by_value_then_index(
    num_columns: int, k: int, device: torch.device
) -> None:
    """Rows with few distinct values and with many."""
    x = random(4, num_columns, like=device, dtype=torch.float32, seed=k) * 3
    x[:2] = x[:2].round().div(4)
    with poisoned_outputs():
        found = top_k(x, k)
    assert found.dtype == torch.int64
    assert found.tolist() == reference_top_k(x, k).tolist()


def test_close_values_and_infinities(device: torch.device) -> None:
    infinity = float("inf")
    rows = [
        [-1.0, -1.0 + 2**-24, -1e-45, -0.0, 0.0, -3e38, -infinity, 1e-45, 5.0],
        [-infinity, -infinity, -infinity, -2.0, -infinity, infinity, -infinity, infinity, 0.0],
    ]
    found = top_k(torch.tensor(rows, device=device), 9).tolist()
    assert found == [[8, 7, 3, 4, 2, 1, 0, 5, 6], [5, 7, 8, 3, 0, 1, 2, 4, 6]]


def test_non_contiguous_rows(device: torch.device) -> None:
    wide = random(3, 300, like=device, dtype=torch.float32)
    assert torch.equal(top_k(wide[:, :100], 5), top_k(wide[:, :100].clone(), 5))
    assert top_k(wide[:0], 5).shape == (0, 5)


def test_invalid_arguments_raise(device: torch.device) -> None:
    with pytest.raises(BadTensor, match=r"x is torch.float16, not torch.float32"):
        top_k(torch.ones(2, 8, device=device).half(), 3)
    with pytest.raises(BadTensor, match=r"x has shape \[8\], not \[any, any\]"):
        top_k(torch.ones(8, device=device), 3)
