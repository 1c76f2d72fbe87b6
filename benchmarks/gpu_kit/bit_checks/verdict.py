"""Comparisons to the last bit, and what they say together.

running   nothing is known yet
main      the operations of a dense layer are known
final     all are known
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu_kit.session import Session

State = Literal["running", "main", "final"]


@dataclass
class Verdict:
    session: Session
    num_equal: int = 0
    unequal: list[str] = field(default_factory=list)  # cases
    raised: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool | None:
        """Whether all comparisons were equal, or None if nothing was compared."""
        if self.unequal or self.raised:
            return False
        return True if self.num_equal else None

    def add(self, state: State) -> None:
        self.session.add(
            case="verdict",
            state=state,
            exact=self.is_exact,
            num_equal=self.num_equal,
            unequal=self.unequal,
            raised=self.raised,
        )

    def compare(
        self, case: str, found: Tensor, wanted: Tensor, kernels: Sequence[str] = ()
    ) -> None:
        """Adds a row. NaN, which is not equal to itself, is a failure, too. Without a device
        nothing was computed, and nothing is compared.
        """
        if self.session.is_dry:
            return
        is_equal = torch.equal(found, wanted)
        differences = {} if is_equal else _differences(found, wanted)
        self.session.add(case=case, is_equal=is_equal, kernels=kernels, **differences)
        if is_equal:
            self.num_equal += 1
        else:
            self.unequal.append(case)

    def raise_unless_exact(self) -> None:
        """Raises RuntimeError."""
        if self.is_exact is False:
            raise RuntimeError(f"unequal bits: {self.unequal}; raised: {self.raised}"[:500])


def _differences(found: Tensor, wanted: Tensor) -> dict[str, Any]:
    differs = (found != wanted).reshape(len(found), -1)
    return {
        "rows_that_differ": round(float(differs.any(1).float().mean()), 4),
        "elements_that_differ": round(float(differs.float().mean()), 6),
        "most": float((found.float() - wanted.float()).abs().max()),
    }
