"""Lowers the logits of a sequence's existing tokens, in place and sparse.

    x' = (x / repetition if x > 0 else x · repetition) - subtracted

`repetition` is CTRL's penalty (arXiv:1909.05858, as transformers and vLLM apply it); `subtracted`
is what OpenAI's API documents: count · frequency_penalty + [count > 0] · presence_penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(
    logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, subtracted: Tensor
) -> None:
    """logits [R, vocab_size] FP32; the others [P], each (row, token id) at most once.

    Overflows are clamped to finite values, as several infinities could not be distinguished.
    """
    x = logits[rows, token_ids]
    x = torch.where(x < 0, x * repetition, x / repetition).sub_(subtracted)
    largest = torch.finfo(x.dtype).max
    logits[rows, token_ids] = x.clamp_(-largest, largest)
