from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.gpu.sampling.penalize import penalize
from kernels.torch_ops.penalize import penalize as reference_penalize
from tests.support.kernels.inputs import random


def _entries(num_entries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct entries in 63 rows of 100 tokens, in random order."""
    generator = torch.Generator().manual_seed(num_entries)
    places = torch.randperm(63 * 100, generator=generator)[:num_entries]
    repetition = torch.rand(num_entries, generator=generator) + 0.5
    subtracted = torch.randn(num_entries, generator=generator)
    each = (places // 100, places % 100, repetition, subtracted)
    rows, token_ids, repetition, subtracted = (column.to(device) for column in each)
    return rows, token_ids, repetition, subtracted


@pytest.mark.parametrize("num_entries", [63, 1000, 1, 0])
def test_penalize_equals_reference_bit_for_bit(num_entries: int, device: torch.device) -> None:
    logits = random(63, 100, like=device, dtype=torch.float32)
    expected, entries = logits.clone(), _entries(num_entries, device)
    reference_penalize(expected, *entries)
    penalize(logits, *entries)
    assert torch.equal(logits, expected)


def test_non_contiguous_rows(device: torch.device) -> None:
    wide = random(63, 150, like=device, dtype=torch.float32)
    expected, beside, entries = wide[:, :100].clone(), wide[:, 100:].clone(), _entries(63, device)
    reference_penalize(expected, *entries)
    penalize(wide[:, :100], *entries)
    assert torch.equal(wide[:, :100], expected)
    assert torch.equal(wide[:, 100:], beside)


def test_no_overflow_reaches_infinity(device: torch.device) -> None:
    logits = torch.full((2, 3), 30.0, device=device)
    places = torch.tensor([1, 1], device=device), torch.tensor([0, 1], device=device)
    penalties = torch.tensor([1e-38, 1e-38], device=device)
    penalize(logits, *places, penalties, torch.tensor([0.0, 3e38], device=device))
    assert torch.isfinite(logits).all()
    assert logits[1, 0] > logits[1, 2] == 30.0


def test_nan_is_not_clamped(device: torch.device) -> None:
    logits = torch.tensor([[float("nan"), 1.0], [1.0, 1.0]], device=device)
    places = torch.arange(2, device=device), torch.zeros(2, device=device).long()
    penalize(logits, *places, torch.ones(2, device=device), torch.zeros(2, device=device))
    assert logits.isnan().tolist() == [[True, False], [False, False]]


def test_invalid_arguments_raise(device: torch.device) -> None:
    logits, entries = torch.ones(63, 100, device=device), _entries(5, device)
    rows, token_ids, repetition, subtracted = entries
    with pytest.raises(BadTensor, match=r"logits is torch.float16, not torch.float32"):
        penalize(logits.half(), *entries)
    with pytest.raises(BadTensor, match=r"token_ids has shape \[4\], not \[5\]"):
        penalize(logits, rows, token_ids[:4], repetition, subtracted)
    with pytest.raises(BadTensor, match=r"rows is torch.int32, not torch.int64"):
        penalize(logits, rows.int(), token_ids, repetition, subtracted)
    with pytest.raises(BadTensor, match=r"subtracted is torch.float64, not torch.float32"):
        penalize(logits, rows, token_ids, repetition, subtracted.double())
