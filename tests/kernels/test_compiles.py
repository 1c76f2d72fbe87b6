"""Every Triton kernel becomes machine code for the GPUs it is meant for, without spilling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED
from tests.kernels.ahead_of_time import compiling

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

BF16 = torch.bfloat16


def _launch_rms_norm() -> None:
    from kernels.rms_norm import add_rms_norm, rms_norm

    x, weight = _empty(64, 4096), _empty(4096)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5, has_unit_offset=True)


LAUNCHES: dict[str, Callable[[], None]] = {
    "rms_norm": _launch_rms_norm,
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("op", LAUNCHES)
def test_compiles_without_spilling(op: str, capability: int) -> None:
    with compiling(capability) as found:
        LAUNCHES[op]()
    assert found
    assert [each for each in found if each.num_spilled_bytes] == []


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)
