from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.rows.gelu_and_mul import gelu_and_mul
from kernels.reference.gated import gelu_and_mul as reference_gelu_and_mul
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near


@pytest.mark.parametrize("num_tokens", [63, 1, 100])
@pytest.mark.parametrize("width", [63, 2048, 1, 100, 5000])
def test_gelu_and_mul(
    num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = random(num_tokens, 2 * width, like=device, dtype=dtype) * 4
    with poisoned_outputs():
        out = gelu_and_mul(gate_up)
    assert out.dtype == dtype
    assert_near(out, reference_gelu_and_mul(gate_up.float()))


def test_large_gates(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, -20.0, 20.0, 200.0, 3.0, 3.0, 3.0, 3.0]], device=device)
    out = gelu_and_mul(gate_up.to(dtype))
    assert_near(out, torch.tensor([[0.0, 0.0, 60.0, 600.0]]))


def test_non_contiguous_rows(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = random(5, 80, like=device, dtype=dtype)[:, 3:69]
    assert_near(gelu_and_mul(gate_up), reference_gelu_and_mul(gate_up.float()))


def test_no_tokens(device: torch.device) -> None:
    assert gelu_and_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


def test_invalid_arguments_raise(device: torch.device) -> None:
    with pytest.raises(BadTensor, match=r"gate_up has shape \[1, 2, 8\]"):
        gelu_and_mul(torch.ones(1, 2, 8, device=device))
    with pytest.raises(BadTensor, match=r"gate_up has 7 columns"):
        gelu_and_mul(torch.ones(2, 7, device=device))
    with pytest.raises(BadTensor, match=r"gate_up is torch.int64"):
        gelu_and_mul(torch.ones(2, 8, device=device, dtype=torch.int64))
