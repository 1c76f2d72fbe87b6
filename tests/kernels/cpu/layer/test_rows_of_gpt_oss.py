"""The gate of experts with biases, and norms that are rounded once, as on CPUs."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.layer.add_rms_norm import add_rms_norm
from kernels.cpu.layer.gated import clamped_gate
from kernels.cpu.layer.rms_norm import rms_norm
from kernels.reference.gated import clamped_gate as reference_gate
from kernels.reference.rms_norm import rms_norm as reference_norm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
LIMITS = {"limit": 0.7, "alpha": 1.702}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_clamped_gate_is_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up, bias = (torch.randn(n, 74, generator=generator).to(dtype) for n in (70, 5))
    gate_up[0] = torch.tensor(3e4).to(dtype)
    gate_up[1] = -gate_up[0]
    experts = torch.arange(70) * 3 % 5
    found = clamped_gate(gate_up, bias, experts, **LIMITS)
    expected = reference_gate(gate_up.double(), bias.double(), experts, **LIMITS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    alone = clamped_gate(gate_up[40:41], bias, experts[40:41], **LIMITS)
    assert torch.equal(alone, found[40:41])


def test_norm_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x, update = (torch.randn(90, 48, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(48, generator=generator).bfloat16()
    found = rms_norm(x, weight, 1e-5, is_rounded_once=True)
    wide = reference_norm(x.double(), weight.double(), 1e-5)
    assert (found.double() - wide).abs().max() <= (wide.abs() * 2**-8).max()
    twice = rms_norm(x, weight, 1e-5)
    errors = [(each.double() - wide).abs().mean() for each in (found, twice)]
    assert errors[0] < errors[1] * 0.9
    assert torch.equal(rms_norm(x[7:8], weight, 1e-5, is_rounded_once=True), found[7:8])
    normed, total = add_rms_norm(x, update, weight, 1e-5, is_rounded_once=True)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, is_rounded_once=True))
