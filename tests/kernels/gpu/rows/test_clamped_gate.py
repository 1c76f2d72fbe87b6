from __future__ import annotations

import pytest
import torch

from kernels.check_tensor import BadTensor
from kernels.gpu.rows.clamped_gate import clamped_gate
from kernels.reference.gated import clamped_gate as reference
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

LIMITS = {"limit": 0.7, "alpha": 1.702}


@pytest.mark.parametrize(("num_rows", "width"), [(5, 80), (1, 2880), (3, 1)])
def test_shapes(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of three experts, within a wider tensor."""
    gate_up = random(num_rows, 2 * width + 3, like=device, dtype=dtype)[:, : 2 * width]
    bias = random(3, 2 * width, like=device, dtype=dtype, seed=1)
    experts = torch.arange(num_rows, device=device) * 2 % 3
    with poisoned_outputs():
        out = clamped_gate(gate_up, bias, experts, **LIMITS)
    assert out.dtype == dtype
    assert_near(out, reference(gate_up.float(), bias.float(), experts, **LIMITS))


def test_large_gates_are_clamped(device: torch.device) -> None:
    gate_up = torch.tensor([[1e4, -1e4, 1e4, -1e4]], device=device)
    out = clamped_gate(
        gate_up, torch.zeros_like(gate_up), torch.zeros(1).long().to(device), **LIMITS
    )
    expected = 0.7 * torch.sigmoid(torch.tensor(0.7 * 1.702)) * 1.7
    torch.testing.assert_close(out.cpu(), torch.tensor([[float(expected), 0.0]]))


def test_nan_is_not_clamped(device: torch.device) -> None:
    """Otherwise a row whose products overflowed would seem to be a result."""
    gate_up = torch.ones(5, 4, device=device)
    gate_up[:4].fill_diagonal_(float("nan"))
    bias, experts = torch.zeros(1, 4, device=device), torch.zeros(5, device=device).long()
    expected = reference(gate_up, bias, experts, **LIMITS).isnan()
    assert expected.sum() == 4
    assert torch.equal(clamped_gate(gate_up, bias, experts, **LIMITS).isnan(), expected)


def test_invalid_arguments_raise(device: torch.device) -> None:
    gate_up, experts = torch.ones(2, 6, device=device), torch.zeros(2, device=device).long()
    for bad, match in (
        ((gate_up[:, :5], gate_up, experts), "5 columns, not an even number"),
        ((gate_up, gate_up[:, :4], experts), "bias has shape"),
        ((gate_up, gate_up.half(), experts), "bias is torch.float16"),
        ((gate_up, gate_up, experts[:1]), "experts has shape"),
        ((gate_up, gate_up, experts.int()), "experts is torch.int32"),
    ):
        with pytest.raises(BadTensor, match=match):
            clamped_gate(*bad, **LIMITS)
