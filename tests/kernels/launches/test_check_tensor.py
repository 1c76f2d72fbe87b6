from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import FLOATS, BadTensor, expect

ROWS = torch.zeros(3, 4)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("tensor", "shape", "options"),
    [
        (ROWS, (3, 4), {"dtype": torch.float32, "device": ROWS.device, "is_contiguous": True}),
        (ROWS, [3, None], {"dtype": FLOATS}),
        (ROWS[:, :2], (None, 2), {}),
        (ROWS[:, :1], (3, 1), {}),  # its last dimension has one element
        (ROWS.T[:0], (0, 3), {"is_contiguous": True}),
        (torch.tensor(1.0), (), {"is_contiguous": True}),
    ],
)
def test_fitting_tensor_is_accepted(tensor: Tensor, shape: Any, options: dict[str, Any]) -> None:
    expect("x", tensor, shape, **options)


@pytest.mark.parametrize(
    ("tensor", "shape", "options", "error"),
    [
        (ROWS, (3, 5), {}, "x has shape [3, 4], not [3, 5]"),
        (ROWS, (None, 5), {}, "x has shape [3, 4], not [any, 5]"),
        (ROWS, (3, 4, None), {}, "x has shape [3, 4], not [3, 4, any]"),
        (ROWS, (None,), {}, "x has shape [3, 4], not [any]"),
        (ROWS, (3, 4), {"dtype": torch.int32}, "x is torch.float32, not torch.int32"),
        (ROWS.long(), (3, 4), {"dtype": FLOATS[:2]}, "not torch.float32 or torch.float16"),
        (ROWS, (3, 4), {"device": META}, "x is on cpu, not on meta"),
        (ROWS.T, (4, 3), {}, "x is not dense in its last dimension: strides (1, 4)"),
        (ROWS[:, :2], (3, 2), {"is_contiguous": True}, "x is not contiguous: strides (4, 1)"),
    ],
)
def test_error_names_what_is_wrong(
    tensor: Tensor, shape: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(BadTensor) as raised:
        expect("x", tensor, shape, **options)
    assert error in str(raised.value)
