from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.gpu.sampling.apply_token_mask import apply_token_mask
from kernels.reference.apply_token_mask import apply_token_mask as reference
from tests.support.kernels.inputs import random

NUM_ROWS = 7


def _masks(rows: list[int], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random words; the first row's allow nothing, the second's all."""
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (len(rows), -(-vocab_size // 32))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)
    words[:1], words[1:2] = 0, -1
    return torch.tensor(rows, dtype=torch.int64, device=device), words.to(device)


@pytest.mark.parametrize("vocab_size", [33, 4097, 9000, 31, 1])
@pytest.mark.parametrize("rows", [[0, 2, 5], [6], []])
def test_equals_reference_bit_for_bit(
    rows: list[int], vocab_size: int, device: torch.device
) -> None:
    logits = random(NUM_ROWS, vocab_size, like=device, dtype=torch.float32)
    expected, masks = logits.clone(), _masks(rows, vocab_size, device)
    reference(expected, *masks)
    apply_token_mask(logits, *masks)
    assert torch.equal(logits, expected)


def test_non_contiguous_rows(device: torch.device) -> None:
    wide = random(NUM_ROWS, 150, like=device, dtype=torch.float32)
    expected, beside = wide[:, :100].clone(), wide[:, 100:].clone()
    masks = _masks([1, 4, 6], 100, device)
    reference(expected, *masks)
    apply_token_mask(wide[:, :100], *masks)
    assert torch.equal(wide[:, :100], expected)
    assert torch.equal(wide[:, 100:], beside)


def test_invalid_arguments_raise(device: torch.device) -> None:
    logits = torch.ones(NUM_ROWS, 100, device=device)
    rows, words = _masks([1, 4, 6], 100, device)
    with pytest.raises(BadTensor, match=r"logits is torch.float16, not torch.float32"):
        apply_token_mask(logits.half(), rows, words)
    with pytest.raises(BadTensor, match=r"words has shape \[3, 3\], not \[3, 4\]"):
        apply_token_mask(logits, rows, words[:, :3])
    with pytest.raises(BadTensor, match=r"rows is torch.int32, not torch.int64"):
        apply_token_mask(logits, rows.int(), words)
