"""Small integers and options, as tensors of a part's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu_kit.session import Session

FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64
EPS = 1e-5
LIMITS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}  # limits of sampling


def integers(session: Session, values: Sequence[int], dtype: torch.dtype = INT64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device=session.device)


def starts(session: Session, counts: Sequence[int]) -> Tensor:
    """Returns the first row of each sequence, and the end."""
    return integers(session, [sum(counts[:index]) for index in range(len(counts) + 1)])


def sampling_columns(session: Session, num_rows: int) -> dict[str, Tensor]:
    """Returns the options of the rows: every third is greedy, every third has limits."""

    def by_kind(greedy: float, free: float, limited: float, dtype: torch.dtype) -> Tensor:
        values = [(greedy, free, limited)[row % 3] for row in range(num_rows)]
        return torch.tensor(values, dtype=dtype, device=session.device)

    return {
        "temperature": by_kind(0.0, 1.0, 0.8, FP32),
        "top_k": by_kind(0, 0, LIMITS["top_k"], INT64),
        "top_p": by_kind(1.0, 1.0, LIMITS["top_p"], FP32),
        "min_p": by_kind(0.0, 0.0, LIMITS["min_p"], FP32),
        "seed": integers(session, range(num_rows)),
        "choice_index": integers(session, [0] * num_rows),
        "output_position": integers(session, [7] * num_rows),
    }
