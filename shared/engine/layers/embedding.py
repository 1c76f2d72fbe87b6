from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.engine.layers.linear import row_invariant_linear


class Embedding(nn.Module):
    """Token vectors; as `logits`, also the output head of a tied model."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] FP32."""
        return row_invariant_linear(hidden, self.weight).float()
