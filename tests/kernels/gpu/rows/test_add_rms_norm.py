from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.rows.add_rms_norm import add_rms_norm
from kernels.reference.add_rms_norm import add_rms_norm as reference_add_rms_norm
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near


@pytest.mark.parametrize("num_rows", [1, 63])
@pytest.mark.parametrize("hidden", [63, 1024, 1, 100])
@pytest.mark.parametrize("has_unit_offset", [False, True])
def test_add_rms_norm(
    num_rows: int, hidden: int, has_unit_offset: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (random(num_rows, hidden, like=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(hidden, like=device, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    with poisoned_outputs():
        out, total = add_rms_norm(x, residual, weight, 1e-5, has_unit_offset=has_unit_offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    # the sum is rounded before it is normalised
    expected, _ = reference_add_rms_norm(
        total.float(),
        torch.zeros_like(total).float(),
        weight.float(),
        1e-5,
        has_unit_offset=has_unit_offset,
    )
    assert_near(out, expected)


def test_non_contiguous_rows(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = random(2, 5, 40, like=device, dtype=dtype)[..., :33]
    weight = random(33, like=device, dtype=dtype, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(out, reference_add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)[0])


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device)
    out, total = add_rms_norm(x, x, torch.ones(8, device=device), 1e-5)
    assert out.shape == total.shape == (0, 8)


def test_invalid_arguments_raise(device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(BadTensor, match=r"residual has shape \[1, 8\], not \[2, 8\]"):
        add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(BadTensor, match=r"residual is torch.float16, not torch.float32"):
        add_rms_norm(x, x.half(), weight, 1e-5)
    with pytest.raises(BadTensor, match=r"weight has shape \[7\], not \[8\]"):
        add_rms_norm(x, x, weight[:7], 1e-5)
