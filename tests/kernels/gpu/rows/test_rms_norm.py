from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.reference.rms_norm import rms_norm as reference_rms_norm
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

WIDTHS = [63, 1024, 1, 100]


@pytest.mark.parametrize("num_rows", [1, 63])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("mode", [{}, {"has_unit_offset": True}, {"is_rounded_once": True}])
def test_rms_norm(
    num_rows: int,
    hidden: int,
    mode: dict[str, bool],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = random(num_rows, hidden, like=device, dtype=dtype)
    weight = random(hidden, like=device, dtype=dtype, seed=1)
    with poisoned_outputs():
        out = rms_norm(x, weight, 1e-5, **mode)
    expected = reference_rms_norm(x.float(), weight.float(), 1e-5, **mode)
    assert out.dtype == dtype
    assert_near(out, expected)


def test_non_contiguous_rows(dtype: torch.dtype, device: torch.device) -> None:
    """The queries of fused projections: heads of a token are adjacent, tokens are not."""
    heads = random(5, 7, 16, like=device, dtype=dtype)[:, :3]
    weight = random(16, like=device, dtype=dtype, seed=1)
    assert_near(
        rms_norm(heads, weight, 1e-5), reference_rms_norm(heads.float(), weight.float(), 1e-5)
    )


def test_row_does_not_depend_on_the_others(dtype: torch.dtype, device: torch.device) -> None:
    x = random(100, 96, like=device, dtype=dtype)
    weight = random(96, like=device, dtype=dtype, seed=1)
    together = rms_norm(x, weight, 1e-5)
    for rows in (slice(0, 1), slice(31, 38), slice(99, 100)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-5), together[rows])


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device)
    assert rms_norm(x, torch.ones(8, device=device), 1e-5).shape == (0, 8)


def test_invalid_arguments_raise(device: torch.device) -> None:
    x = torch.ones(2, 8, device=device)
    with pytest.raises(BadTensor, match=r"weight has shape \[7\], not \[8\]"):
        rms_norm(x, torch.ones(7, device=device), 1e-5)
    with pytest.raises(BadTensor, match=r"weight is torch.float16, not torch.float32"):
        rms_norm(x, torch.ones(8, device=device, dtype=torch.float16), 1e-5)
    with pytest.raises(BadTensor, match=r"x is not dense in its last dimension"):
        rms_norm(torch.ones(8, 2, device=device).t(), torch.ones(8, device=device), 1e-5)
