"""Measures how far one model's next-token distributions are from another's, over given prompts.

    KL(P || Q) = Σ p · (log p - log q)    in nats, of each position of a prompt

P is the reference, Q what is judged; both read the prompt's own tokens, so that no difference adds
up over an answer. Models are computed side by side, a chunk of a prompt at a time: logits of a
whole file would not fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.step import SamplingInputs, StepInputs, sampling_rows
from shared.errors import CheckpointError
from shared.kv_layout import KvLayout

CHUNK_TOKENS = 64  # positions whose logits are in memory at once


@dataclass(slots=True)
class PromptQuality:
    """Quality at each position: KL in nats, and whether both prefer the same token."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)

    @property
    def mean_kl(self) -> float:
        return sum(self.kl) / len(self.kl)


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary over all positions; KL in nats. `worst` is the index of the prompt with the largest
    mean.
    """

    num_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    worst: int
    worst_kl: float


def summary(prompts: Sequence[PromptQuality]) -> Summary:
    kl = np.array([each for prompt in prompts for each in prompt.kl])
    agrees = [each for prompt in prompts for each in prompt.agrees]
    means = [prompt.mean_kl for prompt in prompts]
    worst = int(np.argmax(means))
    return Summary(
        num_tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1_agreement=sum(agrees) / len(agrees),
        worst=worst,
        worst_kl=means[worst],
    )


def compare(
    executors: Mapping[str, LocalExecutor],
    pairs: Sequence[tuple[str, str]],
    prompts: Sequence[Sequence[int]],
) -> list[list[PromptQuality]]:
    """Returns a result of each prompt for each pair of names, reference first. Raises
    CheckpointError for a model whose logits are no numbers.
    """
    found = [[PromptQuality() for _ in prompts] for _ in pairs]
    for index, token_ids in enumerate(prompts):
        steps = [prompt_logits(executor, token_ids) for executor in executors.values()]
        for logits in zip(*steps, strict=True):
            logprobs = {
                name: _logprobs(name, index, each)
                for name, each in zip(executors, logits, strict=True)
            }
            for results, (reference, judged) in zip(found, pairs, strict=True):
                _add(results[index], logprobs[reference], logprobs[judged])
    return found


def _logprobs(name: str, index: int, logits: Tensor) -> Tensor:
    if bool(logits.isnan().any()):
        raise CheckpointError(f"{name}: logits of prompt {index + 1} are NaN")
    return logits.double().log_softmax(-1)


def _add(result: PromptQuality, reference: Tensor, judged: Tensor) -> None:
    """[T, vocab_size] log-probabilities. A token that the reference excludes adds nothing."""
    terms = reference.exp() * (reference - judged)
    terms = terms.where(reference > -torch.inf, 0.0)
    result.kl += terms.sum(-1).clamp_min(0.0).tolist()  # rounding may give -1e-17
    result.agrees += (reference.argmax(-1) == judged.argmax(-1)).tolist()


def num_blocks(kv_layout: KvLayout, num_tokens: int) -> int:
    """Returns the blocks that a prompt takes in all groups."""
    return len(kv_layout.groups) * -(-num_tokens // kv_layout.block_size)


def prompt_logits(executor: LocalExecutor, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """[up to CHUNK_TOKENS, vocab_size] FP32 of consecutive positions."""
    for start, end in pairwise([*range(0, len(token_ids), CHUNK_TOKENS), len(token_ids)]):
        yield executor.step_logits(_step(executor.kv_layout, token_ids, start, end)).cpu()


def _step(layout: KvLayout, token_ids: Sequence[int], start: int, end: int) -> StepInputs:
    """Returns the positions [start, end) of the only sequence in the cache, whose groups
    follow each other.
    """
    positions, num_new = np.arange(start, end), end - start
    num_groups, width = len(layout.groups), -(-len(token_ids) // layout.block_size)
    tables = np.arange(num_groups * width).reshape(num_groups, 1, width)
    slots = tables[:, 0, positions // layout.block_size] * layout.block_size
    return StepInputs(
        input_ids=np.array(token_ids[start:end]),
        positions=positions,
        slot_mapping=slots + positions % layout.block_size,
        query_lens=np.array([num_new]),
        context_lens=np.array([end]),
        block_tables=tables,
        sampling=SamplingInputs(np.arange(num_new), sampling_rows(num_new)),
    )
