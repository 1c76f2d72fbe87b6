from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.reference.linear import linear, pack_weight


class Embedding(nn.Module):
    """Token vectors by id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)


class OutputHead(nn.Module):
    """Hidden states [R, hidden] -> logits [R, vocab_size] FP32; a tied one shares its weight.

    Rows are looked up in a plain weight and multiplied with a packed one, so that a tied model has
    both once it is packed.
    """

    weight: Tensor

    def __init__(self, embedding: Embedding, *, is_tied: bool) -> None:
        super().__init__()
        self.weight = (
            embedding.weight
            if is_tied
            else nn.Parameter(torch.empty_like(embedding.weight), requires_grad=False)
        )

    def pack(self) -> None:
        packed = pack_weight(self.weight)
        del self.weight
        self.weight = packed

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight).float()
