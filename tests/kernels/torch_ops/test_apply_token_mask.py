from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference.apply_token_mask import apply_token_mask as reference
from kernels.torch_ops.apply_token_mask import MANY_WORDS, PIECE, apply_token_mask

INFINITY = float("inf")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _words(num_words: int, share: float, generator: torch.Generator) -> Tensor:
    """Words of tokens that are each allowed with a probability."""
    bits = (torch.rand(num_words, 32, generator=generator) < share).long()
    return (bits << torch.arange(32)).sum(-1).to(torch.int32)


def test_the_mask_decides_by_bit_and_word() -> None:
    logits = torch.arange(70.0).repeat(2, 1)
    words = torch.tensor([[1 << 3 | -1 << 31, 0, 1 << 5]], dtype=torch.int32)
    apply_token_mask(logits, torch.tensor([1]), words)
    assert logits[0].tolist() == list(range(70))
    assert {token: x for token, x in enumerate(logits[1].tolist()) if x > -INFINITY} == {
        3: 3.0,
        31: 31.0,
        69: 69.0,
    }


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 2047, 8 * MANY_WORDS + 1, 8 * PIECE])
def test_equals_the_reference_for_sparse_and_dense_masks(
    vocab_size: int, generator: torch.Generator
) -> None:
    """Also with bits beyond the vocabulary, and for infinite logits."""
    shares = (0.0, 0.001, 0.05, 0.5, 0.999, 1.0)
    num_words = -(-vocab_size // 32)
    words = torch.stack([_words(num_words, share, generator) for share in shares])
    words[0, -1], words[5, -1] = -1, 0
    for rows in ([0, 1, 3, 5, 6, 7], range(len(shares))):
        logits = torch.randn(8 if rows[-1] == 7 else 6, vocab_size, generator=generator)
        logits[:, 0], logits[:, -1] = -INFINITY, INFINITY
        expected = logits.clone()
        reference(expected, torch.tensor(rows), words)
        apply_token_mask(logits, torch.tensor(rows), words)
        assert torch.equal(logits, expected)
