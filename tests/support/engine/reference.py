"""Greedy tokens of transformers, for prompts where rounding cannot change a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MARGIN = 1e-4
ROUTER_MARGIN = 1e-4


def margin_checked_prompt(
    model: PreTrainedModel, num_tokens: int, vocab_size: int, num_sampled: int
) -> tuple[list[int], list[int]]:
    """Returns a random prompt and its greedy continuation, in which each token wins by over MARGIN,
    and the last expert that each token chooses by over ROUTER_MARGIN.
    """
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
        with router_gaps(model) as gaps:
            expected, margin = continuation(model, prompt, num_sampled)
        if margin > MARGIN and min(gaps, default=1.0) > ROUTER_MARGIN:
            return prompt, expected
    raise AssertionError("no prompt with a margin found")


@contextmanager
def router_gaps(model: PreTrainedModel) -> Iterator[list[float]]:
    """The least difference, in each step of each router, between the worst score that is chosen
    and the best that is not: of experts, and of groups.
    """
    gaps: list[float] = []

    def note(router: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        is_llama4 = len(output) == 2  # Llama 4 gives experts that are not chosen a score of 0
        logits, num_chosen = output[1 if is_llama4 else 0], output[-1].shape[-1]
        if is_llama4:
            num_chosen = router.top_k
        scores = logits.float().sigmoid()
        scores = scores + getattr(router, "e_score_correction_bias", 0.0)
        if getattr(router, "num_group", 1) > 1:
            groups = scores.unflatten(1, (router.num_group, -1))
            sums = groups.topk(2).values.sum(dim=-1)
            gaps.append(_gap(sums, router.topk_group))
            is_left = sums < sums.topk(router.topk_group).values[:, -1:]
            scores = groups.masked_fill(is_left.unsqueeze(2), -1e9).flatten(1)
        gaps.append(_gap(scores, num_chosen))

    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("router")]
    hooks = [each.register_forward_hook(note) for each in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def _gap(values: Tensor, num_chosen: int) -> float:
    ordered = values.sort(descending=True).values
    return float((ordered[:, num_chosen - 1] - ordered[:, num_chosen]).min())


def continuation(
    model: PreTrainedModel, prompt: list[int], num_sampled: int
) -> tuple[list[int], float]:
    """Returns greedy tokens, and the smallest difference between the two largest logits."""
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
