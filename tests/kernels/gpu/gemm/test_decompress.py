from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.gpu.gemm.decompress import decompress
from kernels.reference.decompress import decompress as reference_decompress
from kernels.split_weight import SplitWeight, split_weight
from tests.support.kernels.inputs import poisoned_outputs
from tests.support.kernels.split_weights import (
    all_bit_patterns,
    bits_of,
    normal_weight,
    with_outliers,
)

SHAPES = [(63, 100), (33, 600), (5, 2112), (1, 1)]


def _split(weight: Tensor, device: torch.device) -> SplitWeight:
    split = split_weight(weight.to(device), is_always=True)
    assert split is not None
    return split


@pytest.mark.parametrize("share", [0.01, 1.0, 0.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decompress(shape: tuple[int, int], share: float, device: torch.device) -> None:
    weight = with_outliers(normal_weight(*shape), share)
    split = _split(weight, device)
    with poisoned_outputs():
        dense = decompress(split)
    assert torch.equal(bits_of(dense).cpu(), bits_of(weight))
    assert torch.equal(bits_of(dense), bits_of(reference_decompress(split)))


@pytest.mark.parametrize("is_mixed", [False, True])
def test_every_bit_pattern_is_restored(is_mixed: bool, device: torch.device) -> None:
    """Rows with two exponents, and rows with all."""
    weight = all_bit_patterns().t().contiguous() if is_mixed else all_bit_patterns()
    split = _split(weight, device)
    assert split.wide_share == float(is_mixed)
    assert torch.equal(bits_of(decompress(split)).cpu(), bits_of(weight))


def test_columns_beside_out_are_unchanged(device: torch.device) -> None:
    weight = normal_weight(40, 100)
    scratch = torch.full((40, 128), 7.0, dtype=torch.bfloat16, device=device)
    assert decompress(_split(weight, device), scratch[:, :100]).data_ptr() == scratch.data_ptr()
    assert torch.equal(scratch[:, :100].cpu(), weight)
    assert (scratch[:, 100:] == 7).all()


def test_no_rows(device: torch.device) -> None:
    split = _split(normal_weight(0, 128), device)
    assert decompress(split).shape == (0, 128)


def test_invalid_arguments_raise(device: torch.device) -> None:
    split = _split(normal_weight(4, 128), device)
    with pytest.raises(BadTensor, match=r"out has shape \[4, 64\], not \[4, 128\]"):
        decompress(split, torch.empty(4, 64, dtype=torch.bfloat16, device=device))
    with pytest.raises(BadTensor, match=r"out is torch.float16, not torch.bfloat16"):
        decompress(split, torch.empty(4, 128, dtype=torch.float16, device=device))
