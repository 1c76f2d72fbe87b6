"""Log-probabilities of the token at a position and of the top k tokens there."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import top_k
from shared.messages import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top_logprobs: list[int]
) -> list[TokenLogprobs]:
    """logits [R, vocab_size] FP32, token_ids and num_likeliest [R] -> [R].

    A row in which no token is allowed is -inf throughout, not NaN.
    """
    logprobs = logits.log_softmax(-1)
    logprobs.masked_fill_(logprobs.isnan(), float("-inf"))
    top = top_k(logprobs, max(num_top_logprobs))
    columns = zip(
        logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist(),
        top.tolist(),
        logprobs.gather(1, top).tolist(),
        num_top_logprobs,
        strict=True,
    )
    return [
        TokenLogprobs(own, tuple(top_ids[:k]), tuple(values[:k]))
        for own, top_ids, values, k in columns
    ]
