"""One launch of an operation: its seeded inputs, and its result in FP32 by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_kit.session import Session

FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64
NEAR = 1.6e-2  # the most that a BF16 result may deviate, relative to the largest element
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """`wanted` computes on the device of the inputs. `is_exact`: the bits of the result depend on
    nothing but the inputs and the kind of card.
    """

    kernels: tuple[str, ...]
    launch: Callable[[], Tensor]
    wanted: Callable[[], Tensor]
    tolerance: float = NEAR
    is_exact: bool = True


Build = Callable[[Session], Case]


def integers(session: Session, values: Sequence[int], dtype: torch.dtype = INT64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device=session.device)


def column(session: Session, value: float, num_rows: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full((num_rows,), value, dtype=dtype, device=session.device)
