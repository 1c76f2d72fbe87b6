"""Outputs of a step besides sampled tokens: logprobs of prompt tokens, and embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.sampling.logprobs import token_logprobs
from shared.engine.step import PromptSuccessors, StepInputs
from shared.messages import TokenLogprobs

# Rows times vocabulary whose logits are computed at once: 16 MiB, and 100 MiB for ranking them.
MAX_LOGITS = 1 << 22

Layer = Callable[[Tensor], Tensor]


def prompt_logprobs(
    hidden: Tensor,
    inputs: StepInputs,
    logits_of: Layer,
    *,
    vocab_size: int,
    max_logits: int = MAX_LOGITS,
) -> dict[int, list[TokenLogprobs]]:
    """hidden [T, hidden_size] before the final norm -> by sequence, of each of its successors."""
    chunks = hidden.split(inputs.query_lens.tolist()) if inputs.prompt_logprobs else ()
    num_rows = rows_at_once(vocab_size, max_logits)
    return {
        index: _successor_logprobs(chunks[index], requested, logits_of, num_rows)
        for index, requested in inputs.prompt_logprobs.items()
    }


def rows_at_once(vocab_size: int, max_logits: int = MAX_LOGITS) -> int:
    """Returns the most rows whose logits are computed at once."""
    return max(1, max_logits // vocab_size)


def _successor_logprobs(
    chunk: Tensor, requested: PromptSuccessors, logits_of: Layer, num_rows: int
) -> list[TokenLogprobs]:
    token_ids = torch.from_numpy(requested.token_ids).to(chunk.device)
    parts = zip(chunk[: len(token_ids)].split(num_rows), token_ids.split(num_rows), strict=True)
    logprobs: list[TokenLogprobs] = []
    for part, following in parts:
        logprobs += token_logprobs(
            logits_of(part), following, [requested.num_top_logprobs] * len(following)
        )
    return logprobs


def pooled(hidden: Tensor, inputs: StepInputs, norm: Layer) -> dict[int, NDArray[np.float64]]:
    """hidden [T, hidden_size] before the final norm -> by sequence, as in `StepOutput`."""
    chunks = hidden.split(inputs.query_lens.tolist()) if inputs.pooling else ()
    found = {}
    for index, requested in inputs.pooling.items():
        normed = norm(chunks[index]).double().cpu().numpy()
        found[index] = _sum(normed, requested.before) if requested.how == "mean" else normed[-1]
    return found


def _sum(vectors: NDArray[np.float64], before: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Adds one vector after the other, so that the sum does not depend on chunking."""
    total = np.zeros_like(vectors[0]) if before is None else before.copy()
    for vector in vectors:
        total += vector
    return total
