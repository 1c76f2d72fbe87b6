"""Excludes the tokens that a mask forbids, in place.

x' = x if bit t % 32 of word t // 32 is set, else -inf,  for each token t
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """logits [R, vocab_size] FP32, none NaN; rows [M] int64, ascending; words
    [M, ⌈vocab_size / 32⌉] int32. Bits beyond the vocabulary are ignored.
    """
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]] != 0
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
