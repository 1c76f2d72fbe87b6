from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from kernels.torch_ops.penalize import penalize

SEEN = [3, 0, 7, 3, 3, 11]


def _penalized(
    logits: Tensor, token_ids: list[int], repetition: float, subtracted: list[float]
) -> Tensor:
    """Penalizes row 1 of three."""
    out = logits.clone()
    rows = torch.ones(len(token_ids), dtype=torch.int64)
    penalties = torch.full((len(token_ids),), repetition)
    penalize(out, rows, torch.tensor(token_ids), penalties, torch.tensor(subtracted))
    return out


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.3, 2.0])
def test_repetition_equals_transformers_bit_for_bit(logits: Tensor, repetition: float) -> None:
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([SEEN]), logits[1:2])
    distinct = sorted(set(SEEN))
    actual = _penalized(logits, distinct, repetition, [0.0] * len(distinct))
    assert torch.equal(actual[1:2], expected)


def test_only_given_rows_and_tokens_change(logits: Tensor) -> None:
    actual = _penalized(logits, [3, 7], 2.0, [0.5, 0.0])
    changed = torch.nonzero(actual != logits).tolist()
    assert changed == [[1, 3], [1, 7]]


def test_repetition_is_applied_before_subtraction() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [3.0, -3.0, 0.0]])
    assert _penalized(logits, [0, 1, 2], 2.0, [1.0, 1.0, 1.0])[1].tolist() == [0.5, -7.0, -1.0]


def test_no_overflow_reaches_infinity() -> None:
    logits = torch.full((2, 3), 30.0)
    actual = _penalized(logits, [0, 1], 1e-38, [0.0, 3e38])
    assert torch.isfinite(actual).all()
    assert actual[1, 0] > actual[1, 2] == 30.0
