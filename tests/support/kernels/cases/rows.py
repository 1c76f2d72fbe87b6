"""Operations on rows."""

from __future__ import annotations

import torch

from kernels.gpu.rows import add_rms_norm as add_norms
from kernels.gpu.rows import clamped_gate as clamped
from kernels.gpu.rows import gelu_and_mul as gelu
from kernels.gpu.rows import rms_norm as norms
from kernels.gpu.rows import silu_and_mul as silu
from kernels.reference.gated import clamped_gate as reference_clamped
from kernels.reference.gated import gelu_and_mul as reference_gelu
from kernels.reference.gated import silu_and_mul as reference_silu
from kernels.reference.rms_norm import rms_norm as reference_norm
from tests.support.kernels.cases.case import Inputs, Result, Results, cases

EPS = 1e-5
LIMITS = {"limit": 0.7, "alpha": 1.702}


def rms_norm(inputs: Inputs, rows: str) -> Results:
    sizes = inputs.sizes
    x, weight = inputs.random(sizes.rows[rows], sizes.hidden), inputs.random(sizes.hidden, seed=1)
    y = norms.rms_norm(x, weight, EPS)
    return (Result(y, lambda: reference_norm(x.float(), weight.float(), EPS)),)


def add_rms_norm(inputs: Inputs, rows: str, has_unit_offset: bool) -> Results:
    shape = inputs.sizes.rows[rows], inputs.sizes.hidden
    x, residual = inputs.random(*shape), inputs.random(*shape, seed=1)
    weight, offset = inputs.random(shape[1], seed=2), {"has_unit_offset": has_unit_offset}
    y, total = add_norms.add_rms_norm(x, residual.clone(), weight, EPS, **offset)
    return (
        Result(total, lambda: x + residual),
        Result(y, lambda: reference_norm((x + residual).float(), weight.float(), EPS, **offset)),
    )


def silu_and_mul(inputs: Inputs, rows: str) -> Results:
    gate_up = inputs.random(inputs.sizes.rows[rows], 2 * inputs.sizes.inner)
    y = silu.silu_and_mul(gate_up)
    return (Result(y, lambda: reference_silu(gate_up.float())),)


def gelu_and_mul(inputs: Inputs, rows: str) -> Results:
    gate_up = inputs.random(inputs.sizes.rows[rows], 2 * inputs.sizes.gelu_inner)
    y = gelu.gelu_and_mul(gate_up)
    return (Result(y, lambda: reference_gelu(gate_up.float())),)


def clamped_gate(inputs: Inputs, rows: str) -> Results:
    """Adds the biases of three experts."""
    num_rows, width = inputs.sizes.rows[rows], 2 * inputs.sizes.inner
    gate_up, bias = inputs.random(num_rows, width), inputs.random(3, width, seed=1)
    experts = inputs.integers([row % 3 for row in range(num_rows)], torch.int64)
    y = clamped.clamped_gate(gate_up, bias, experts, **LIMITS)
    return (Result(y, lambda: reference_clamped(gate_up.float(), bias.float(), experts, **LIMITS)),)


CASES = [
    *cases(rms_norm, rows=("batch", "one")),
    *cases(add_rms_norm, rows=("batch", "one", "chunk"), has_unit_offset=(False,)),
    *cases(add_rms_norm, rows=("batch",), has_unit_offset=(True,)),
    *cases(silu_and_mul, rows=("batch",)),
    *cases(gelu_and_mul, rows=("batch",)),
    *cases(clamped_gate, rows=("batch",)),
]
