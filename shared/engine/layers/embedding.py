from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ops import argmax
from shared.engine.layers.linear import MatmulModule, MatrixModule, unset_parameter


class TokenEmbedding(MatrixModule):
    """Token vectors by id, times `scale` rounded to `dtype`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None = None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.scale = (
            None if scale is None else float(torch.tensor(scale, dtype=dtype, device="cpu"))
        )
        self.set_parameter(unset_parameter(vocab_size, hidden_size, dtype=dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        vectors = self.method.select_rows(token_ids)
        return vectors if self.scale is None else vectors.mul_(self.scale)


class OutputHead(MatmulModule):
    """Hidden states [R, hidden] -> logits [R, vocab_size] FP32; a tied head shares the weight.

    `softcap` maps a logit to cap · tanh(logit / cap).
    The embedding needs the dense weight and the GEMM a packed one, so a packed tied model has
    both; a compressed weight serves both.
    """

    def __init__(
        self, embedding: TokenEmbedding, *, is_tied: bool, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.softcap = softcap
        shared = embedding.parameter
        assert isinstance(shared, nn.Parameter)
        self.set_parameter(
            shared if is_tied else unset_parameter(*shared.shape, dtype=shared.dtype)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.method.logits(hidden)
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """Returns the column of each row's largest logit, the first of equal ones: [R] int64."""
        return self.method.argmax(hidden) if self.softcap is None else argmax(self(hidden))
