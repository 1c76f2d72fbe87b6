"""The MLPs of a layer's experts by torch's grouped GEMM.

It gathers the rows and has more launches, so Triton's kernel is the faster one for few rows. What
is faster for many depends on shape and device, and it has never run on a device: it is used on
request alone. The part `experts` of the GPU kit compares both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.device import compute_capability
from kernels.gpu.rows.gelu_and_mul import gelu_and_mul
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from kernels.routing import ExpertRows, ExpertWeights

CAPABILITIES = (90, 100)  # elsewhere torch reads the offsets on the host, and waits for the device
ROW_BYTES = 16  # divide a row of each operand


class LibraryCase(NamedTuple):
    """`widths` are the elements of the operands' rows."""

    capability: int
    dtype: torch.dtype
    has_grouped_mm: bool
    widths: tuple[int, ...]


def by_library(x: Tensor, rows: ExpertRows, weights: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """Computes kernels.reference.grouped_linear without factors. Nothing waits for the device where
    the capability is one of CAPABILITIES.
    """
    gate = gelu_and_mul if weights.is_gelu else silu_and_mul
    ends = rows.offsets[1:].int()

    def product(own: Tensor, weight: Tensor) -> Tensor:
        experts = weight.unflatten(0, (len(ends), -1))
        return torch.nn.functional.grouped_mm(own, experts.transpose(1, 2), offs=ends)

    y = product(gate(product(x.index_select(0, rows.tokens), weights.gate_up)), weights.down)
    if weights.shared_gate_up is None or weights.shared_down is None:
        return y, None
    linear = torch.nn.functional.linear
    own = x[:, : weights.shared_gate_up.shape[1]]
    return y, linear(gate(linear(own, weights.shared_gate_up)), weights.shared_down)


def reason_against(case: LibraryCase) -> str:
    """Returns why the library cannot multiply; empty if it can."""
    if not case.has_grouped_mm:
        return "this torch has no grouped_mm"
    if case.capability not in CAPABILITIES:
        return f"grouped_mm waits for a device of compute capability {case.capability / 10}"
    if case.dtype != torch.bfloat16:
        return f"grouped_mm multiplies BF16, not {case.dtype}"
    for width in case.widths:
        if width * case.dtype.itemsize % ROW_BYTES:
            return f"grouped_mm needs rows of full {ROW_BYTES} bytes, not of {width} elements"
    return ""


def library_case(weights: ExpertWeights, num_experts: int) -> LibraryCase:
    gate_up, down = weights.gate_up, weights.down
    widths = gate_up.shape[1], len(gate_up) // num_experts, down.shape[1]
    has_grouped_mm = hasattr(torch.nn.functional, "grouped_mm")
    return LibraryCase(compute_capability(gate_up.device), gate_up.dtype, has_grouped_mm, widths)
