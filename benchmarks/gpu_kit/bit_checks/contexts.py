"""A prompt's attention in one call, in chunks, beside another prompt, and as decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.bit_checks.sizes import sizes_of
from benchmarks.gpu_kit.bit_checks.verdict import Verdict
from benchmarks.gpu_kit.operands.columns import integers, starts
from benchmarks.gpu_kit.operands.paged import LATENT, LATENT_SCALE, ROTATED, Paged, latents, paged
from benchmarks.gpu_kit.session import Session

POSITIONS = (0, 63, 1023, 1024, 2047, 2048)  # around the ends of tiles and segments


@dataclass(frozen=True)
class Prompt:
    query: Tensor  # [T, heads, head_dim]
    paged: Paged
    scale: float
    options: dict[str, Any]

    def attended(self, session: Session, first: int, end: int, num_others: int = 0) -> Tensor:
        """Returns the attention of tokens [first, end) of the prompt, beside as many first tokens
        of a second one.
        """
        from kernels.gpu.attention.prefill_attention import prefill_attention

        rows = torch.cat([self.query[first:end], self.query[:num_others]])
        counts, lens = [end - first], [end]
        if num_others:
            counts, lens = [*counts, num_others], [*lens, num_others]
        given = starts(session, counts), integers(session, lens), self.scale
        tables = self.paged.tables[: len(lens)]
        out = prefill_attention(rows, self.paged.cache, tables, *given, **self.options)
        return out[: end - first]

    def decoded(self, session: Session, positions: list[int]) -> Tensor:
        from kernels.gpu.attention.decode_attention import decode_attention

        index = integers(session, positions)
        tables = self.paged.tables[:1].expand(len(positions), -1)
        query = self.query[index]
        return decode_attention(
            query, self.paged.cache, tables, index + 1, self.scale, **self.options
        )


def heads_prompt(session: Session) -> Prompt:
    """Returns a prompt with the model's grouped queries."""
    shapes, num_tokens = session.shapes, sizes_of(session).prompt
    query = session.random(num_tokens, shapes.heads, shapes.head_dim)
    exact = {"is_batch_invariant": True}
    return Prompt(query, paged(session, [num_tokens] * 2), shapes.head_dim**-0.5, exact)


def latent_prompt(session: Session) -> Prompt:
    num_tokens = sizes_of(session).prompt
    query = session.random(num_tokens, 16, LATENT + ROTATED)
    context = latents(session, [num_tokens] * 2)
    options = {"value_dim": LATENT, "is_batch_invariant": True}
    return Prompt(query, context, LATENT_SCALE, options)


def compare(verdict: Verdict, name: str, prompt: Prompt) -> None:
    session, num_tokens = verdict.session, len(prompt.query)
    kernels = ("prefill_attention",)
    together = prompt.attended(session, 0, num_tokens)
    if not session.is_dry:
        session.digest(f"{name}, {num_tokens} tokens", together, kernels=kernels)
    for chunk in sizes_of(session).chunks:
        firsts = range(0, num_tokens, chunk)
        parts = [prompt.attended(session, each, min(each + chunk, num_tokens)) for each in firsts]
        verdict.compare(f"{name} in chunks of {chunk}", torch.cat(parts), together, kernels)
    beside = prompt.attended(session, 0, num_tokens, num_others=num_tokens // 2)
    verdict.compare(f"{name} beside another prompt", beside, together, kernels)
    positions = [each for each in (*POSITIONS, num_tokens - 1) if each < num_tokens]
    decoded = prompt.decoded(session, positions)
    wanted = together[integers(session, positions)]
    verdict.compare(f"{name}, decoded", decoded, wanted, ("decode_attention", *kernels))
