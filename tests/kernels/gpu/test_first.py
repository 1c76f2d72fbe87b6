"""At most 125 cases, for the first seconds on a GPU: each kernel at real sizes in BF16, compared
with a reference that the GPU computes in FP32.

The interpreter runs the same cases at small sizes: one of each function, in long runs all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.device import IS_INTERPRETED
from tests.support.kernels.cases.case import Case, Inputs
from tests.support.kernels.cases.sizes import REAL, SMALL
from tests.support.kernels.cases.table import CASES, samples

OFTEN = samples() if IS_INTERPRETED else CASES
PARAMETERS = [
    pytest.param(case, id=str(case), marks=() if case in OFTEN else pytest.mark.long)
    for case in CASES
]


@pytest.mark.first
@pytest.mark.usefixtures("small_segments")
@pytest.mark.each_value
@pytest.mark.parametrize("case", PARAMETERS)
def test_first(
    case: Case, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    record_property("kernels", case.kernels)
    case.check(Inputs(SMALL if IS_INTERPRETED else REAL, device))
