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


def _launch_linear() -> None:
    from kernels.linear import linear

    for num_columns, width in ((4096, 4096), (28672, 4096)):
        weight = _empty(num_columns, width)
        for num_rows in (1, 64, 512):
            for is_batch_invariant in (False, True):
                linear(_empty(num_rows, width), weight, is_batch_invariant=is_batch_invariant)
    linear(_empty(8, 100), _empty(63, 100), _empty(63))


def _launch_likeliest() -> None:
    from kernels.likeliest import likeliest

    likeliest(_empty(64, 128_256, dtype=torch.float32), 20)


def _launch_penalize() -> None:
    from kernels.penalize import penalize

    floats, integers = _empty(5000, dtype=torch.float32), _empty(5000, dtype=torch.int64)
    penalize(_empty(64, 128_256, dtype=torch.float32), integers, integers, floats, floats)


def _launch_sample() -> None:
    from kernels.sample import sample

    floats, integers = _empty(64, dtype=torch.float32), _empty(64, dtype=torch.int64)
    logits = _empty(64, 128_256, dtype=torch.float32)
    for mask in (None, _empty(64, 4008, dtype=torch.int32)):
        sample(logits, floats, integers, floats, floats, integers, integers, integers, mask)


LAUNCHES: dict[str, Callable[[], None]] = {
    "likeliest": _launch_likeliest,
    "linear": _launch_linear,
    "penalize": _launch_penalize,
    "sample": _launch_sample,
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
