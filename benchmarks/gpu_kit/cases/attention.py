"""Attention over a paged cache: decode and prefill, of grouped queries and of latents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.case import FP32, Build, Case, integers
from benchmarks.gpu_kit.cases.paged import Paged, paged
from benchmarks.gpu_kit.session import Session

CONTEXTS = {  # a segment is 1,024 tokens
    "1 x 2048": (2048,),
    "1 x 8192": (8192,),
    "64 x up to 2048": tuple(2048 if row % 4 else 1 + 31 * row for row in range(64)),
}
PROMPTS = {"512 tokens": ((512,), (512,)), "256 behind 1800, 200": ((256, 200), (2056, 200))}
FP8 = torch.float8_e4m3fn
LATENT, ROTATED = 512, 64  # elements of DeepSeek-V2's cached row
LATENT_SCALE = (128 + ROTATED) ** -0.5


def decode(context: str, is_exact: bool, dtype: torch.dtype, session: Session) -> Case:
    from kernels.gpu.attention.decode_attention import decode_attention as launch
    from kernels.reference.decode_attention import decode_attention as reference

    lens, heads = CONTEXTS[context], (session.shapes.heads, session.shapes.head_dim)
    batch = paged(session, lens, dtype=dtype)
    query, scale = session.random(len(lens), *heads), heads[1] ** -0.5
    options: dict[str, Any] = {"kv_scales": _scales(session, dtype)}
    return Case(
        ("decode_attention",),
        lambda: launch(query, *batch.arguments, scale, is_batch_invariant=is_exact, **options),
        lambda: reference(query.float(), *batch.arguments, scale, **options),
        is_exact=is_exact,
    )


def prefill(prompt: str, is_exact: bool, session: Session) -> Case:
    from kernels.gpu.attention.prefill_attention import prefill_attention as launch
    from kernels.reference.prefill_attention import prefill_attention as reference

    counts, lens = PROMPTS[prompt]
    batch, heads = paged(session, lens), (session.shapes.heads, session.shapes.head_dim)
    query, scale = session.random(sum(counts), *heads), heads[1] ** -0.5
    cache, tables, context_lens = batch.arguments
    given = (cache, tables, starts(session, counts), context_lens, scale)
    return Case(
        ("prefill_attention",),
        lambda: launch(query, *given, is_batch_invariant=is_exact),
        lambda: reference(query.float(), *given),
        is_exact=is_exact,
    )


def latent_decode(num_heads: int, is_exact: bool, session: Session) -> Case:
    from kernels.gpu.attention.decode_attention import decode_attention as launch
    from kernels.reference.decode_attention import decode_attention as reference

    batch = latents(session, CONTEXTS["64 x up to 2048"])
    query = session.random(len(batch.lens), num_heads, LATENT + ROTATED)
    given = (*batch.arguments, LATENT_SCALE)
    return Case(
        ("decode_attention",),
        lambda: launch(query, *given, value_dim=LATENT, is_batch_invariant=is_exact),
        lambda: reference(query.float(), *given, value_dim=LATENT),
        is_exact=is_exact,
    )


def latent_prefill(num_heads: int, is_exact: bool, session: Session) -> Case:
    from kernels.gpu.attention.prefill_attention import prefill_attention as launch
    from kernels.reference.prefill_attention import prefill_attention as reference

    counts, lens = PROMPTS["256 behind 1800, 200"]
    cache, tables, context_lens = latents(session, lens).arguments
    query = session.random(sum(counts), num_heads, LATENT + ROTATED)
    given = (cache, tables, starts(session, counts), context_lens, LATENT_SCALE)
    return Case(
        ("prefill_attention",),
        lambda: launch(query, *given, value_dim=LATENT, is_batch_invariant=is_exact),
        lambda: reference(query.float(), *given, value_dim=LATENT),
        is_exact=is_exact,
    )


def latents(session: Session, lens: Sequence[int]) -> Paged:
    return paged(session, lens, planes=1, kv_heads=1, head_dim=LATENT + ROTATED)


def starts(session: Session, counts: Sequence[int]) -> Tensor:
    """The first row of each sequence, and the end."""
    return integers(session, [sum(counts[:index]) for index in range(len(counts) + 1)])


def _scales(session: Session, dtype: torch.dtype) -> Tensor | None:
    if dtype != FP8:
        return None
    return torch.full((2, session.shapes.kv_heads), 0.5, dtype=FP32, device=session.device)


CASES: dict[str, Build] = {
    **{
        f"decode_attention {context}, {mode}": partial(
            decode, context, mode == "exact", torch.bfloat16
        )
        for mode in ("exact", "free")
        for context in CONTEXTS
    },
    **{
        f"prefill_attention {prompt}, {mode}": partial(prefill, prompt, mode == "exact")
        for mode in ("exact", "free")
        for prompt in PROMPTS
    },
    **{
        f"decode_attention FP8, {mode}": partial(decode, "64 x up to 2048", mode == "exact", FP8)
        for mode in ("exact", "free")
    },
}
LATENT_CASES: dict[str, Build] = {
    f"latent {name}, 16 heads, {mode}": partial(build, 16, mode == "exact")
    for mode in ("exact", "free")
    for name, build in (("decode", latent_decode), ("prefill", latent_prefill))
}
