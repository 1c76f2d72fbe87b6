"""Choices of tokens from logits of the model's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.case import FP32, INT64, Build, Case, column, integers
from benchmarks.gpu_kit.session import Session

NUM_ROWS = 64
LIMITS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
NEAR_FP32 = 1e-4
FORBIDDEN = -1e3  # stands for -inf where results are compared


def sample(session: Session) -> Case:
    """The scores of the sampled tokens: two nearly equal ones may be exchanged."""
    from kernels.gpu.sampling.sample import sample as launch
    from kernels.torch_ops.sample import sample as reference

    logits, columns = _logits(session), columns_of(session)

    def scores_by(op: Callable[..., Tensor]) -> Tensor:
        tokens = op(logits, *columns.values())
        if session.is_dry:
            return tokens
        return _scores(logits, columns).gather(1, tokens.unsqueeze(1))

    return Case(
        ("sample",),
        lambda: scores_by(launch),
        lambda: scores_by(reference),
        tolerance=NEAR_FP32,
    )


def columns_of(session: Session, num_rows: int = NUM_ROWS) -> dict[str, Tensor]:
    """The options of the rows: every third is greedy, every third has limits."""

    def by_kind(greedy: float, free: float, limited: float, dtype: torch.dtype) -> Tensor:
        values = [(greedy, free, limited)[row % 3] for row in range(num_rows)]
        return torch.tensor(values, dtype=dtype, device=session.device)

    return {
        "temperature": by_kind(0.0, 1.0, 0.8, FP32),
        "top_k": by_kind(0, 0, LIMITS["top_k"], INT64),
        "top_p": by_kind(1.0, 1.0, LIMITS["top_p"], FP32),
        "min_p": by_kind(0.0, 0.0, LIMITS["min_p"], FP32),
        "seed": integers(session, range(num_rows)),
        "choice_index": column(session, 0, num_rows, INT64),
        "output_position": column(session, 7, num_rows, INT64),
    }


def _scores(logits: Tensor, columns: dict[str, Any]) -> Tensor:
    """What each row takes the largest of: its logits, or scaled ones with noise."""
    from kernels.torch_ops.sample import scale, uniform

    limits = [columns[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    seed, choice, position = (columns[name] for name in ("seed", "choice_index", "output_position"))
    noise = uniform(seed, choice, position, logits.shape[1])
    is_greedy = (limits[0] == 0).unsqueeze(1)
    scaled = scale(logits.clone(), limits[0] + (limits[0] == 0), *limits[1:])
    noisy = scaled - noise.log().neg().log()
    return torch.where(is_greedy, logits, noisy.clamp(min=FORBIDDEN))


def top_k(session: Session) -> Case:
    from kernels.gpu.sampling.top_k import top_k as launch
    from kernels.torch_ops.top_k import top_k as reference

    logits = _logits(session)
    return _equal("top_k", lambda: launch(logits, 20), lambda: reference(logits, 20))


def penalize(session: Session) -> Case:
    from kernels.gpu.sampling.penalize import penalize as launch
    from kernels.torch_ops.penalize import penalize as reference

    rows = integers(session, [row for row in range(NUM_ROWS) for _ in range(20)])
    tokens = integers(session, [3 * each for _ in range(NUM_ROWS) for each in range(20)])
    repetition, subtracted = (column(session, value, len(rows)) for value in (1.1, 0.3))

    def on(op: Callable[..., None]) -> Tensor:
        logits = _logits(session)
        op(logits, rows, tokens, repetition, subtracted)
        return logits

    return _equal("penalize", lambda: on(launch), lambda: on(reference), tolerance=NEAR_FP32)


def apply_token_mask(session: Session) -> Case:
    from kernels.gpu.sampling.apply_token_mask import apply_token_mask as launch
    from kernels.reference.apply_token_mask import apply_token_mask as reference

    rows = integers(session, range(NUM_ROWS))
    num_words = -(-session.shapes.vocab // 32)
    words = column(session, 0x0F0F0F0F, NUM_ROWS * num_words, torch.int32)

    def on(op: Callable[..., None]) -> Tensor:
        logits = _logits(session)
        op(logits, rows, words.view(NUM_ROWS, num_words))
        return logits if session.is_dry else logits.clamp(min=FORBIDDEN)

    return _equal("apply_token_mask", lambda: on(launch), lambda: on(reference))


def _equal(
    op: str, launch: Callable[[], Tensor], wanted: Callable[[], Tensor], tolerance: float = 0.0
) -> Case:
    return Case((op,), launch, wanted, tolerance=tolerance)


def _logits(session: Session) -> Tensor:
    return session.random(NUM_ROWS, session.shapes.vocab, dtype=FP32)


CASES: dict[str, Build] = {
    each.__name__: each for each in (sample, top_k, penalize, apply_token_mask)
}
