from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ops import Weight, argmax, argmax_logits, logits, pack_weight, select_rows
from shared.engine.layers.linear import parameter_of, replace_weight


class TokenEmbedding(nn.Module):
    """Token vectors by id, times `scale` rounded to `dtype`."""

    weight: Weight

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None = None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=dtype))
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        vectors = select_rows(self.weight, token_ids)
        return vectors if self.scale is None else vectors.mul_(self.scale)


class OutputHead(nn.Module):
    """Hidden states [R, hidden] -> logits [R, vocab_size] FP32; a tied head shares the weight.

    `softcap` maps a logit to cap · tanh(logit / cap).
    The embedding needs the dense weight and the product a packed one, so a packed tied model has
    both; a compressed weight serves both.
    """

    weight: Weight
    is_batch_invariant = True  # see kernels.ops.linear

    def __init__(
        self, embedding: TokenEmbedding, *, is_tied: bool, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.softcap = softcap
        self.weight = (
            embedding.weight
            if is_tied
            else nn.Parameter(torch.empty_like(parameter_of(embedding)), requires_grad=False)
        )

    def pack(self) -> None:
        if isinstance(self.weight, Tensor):
            replace_weight(self, pack_weight(self.weight))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = logits(hidden, self.weight, is_batch_invariant=self.is_batch_invariant)
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """The column of each row's largest logit, the first of equal ones: [R] int64."""
        if self.softcap is None:
            return argmax_logits(hidden, self.weight, is_batch_invariant=self.is_batch_invariant)
        return argmax(self(hidden))
