"""Greedy tokens of transformers, for prompts where rounding cannot change a token."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

MARGIN = 1e-4


def margin_checked_prompt(
    model: PreTrainedModel, num_tokens: int, vocab_size: int, num_sampled: int
) -> tuple[list[int], list[int]]:
    """A random prompt and its greedy continuation, in which each token wins by over MARGIN."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
        expected, margin = _continuation(model, prompt, num_sampled)
        if margin > MARGIN:
            return prompt, expected
    raise AssertionError("no prompt with a margin found")


def _continuation(
    model: PreTrainedModel, prompt: list[int], num_sampled: int
) -> tuple[list[int], float]:
    """Greedy tokens, and the smallest difference between the two largest logits."""
    token_ids, margin = list(prompt), float("inf")
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        for _ in range(num_sampled):
            first, second = out.logits[0, -1].topk(2).values.tolist()
            margin = min(margin, first - second)
            token_ids.append(int(out.logits[0, -1].argmax()))
            out = model(
                torch.tensor([token_ids[-1:]]), past_key_values=out.past_key_values, use_cache=True
            )
    return token_ids[len(prompt) :], margin
