"""The MLPs of a layer's experts by torch's grouped GEMM, and from how many rows on it is used.

It gathers the rows and has more launches, so Triton's kernel is the faster one for few rows. What
is faster for many depends on shape and device: it is measured at a worker's start, once its result
is that of the kernel, and stored in `library_experts.json` of the cache directory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import cache_root
from kernels.device import compute_capability
from kernels.gpu.gemm.fused_rows import FusedRows, device_case, milliseconds
from kernels.gpu.rows.gelu_and_mul import gelu_and_mul
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from kernels.routing import NEVER, ExpertRows, ExpertWeights, LibraryChoice

CAPABILITIES = (90, 100)  # elsewhere torch reads the offsets on the host, and waits for the device
ROW_BYTES = 16  # divide a row of each operand
NUM_ROWS = (64, 256, 1024, 4096, 16_384)
CHECKED_ROWS = NUM_ROWS[1]
MOST_ERROR = 2e-2  # RMS of the differences over that of the results, both rounded to BF16
SOURCES = ("expert_mlp.py", "library_experts.py")

Mlp = Callable[[Tensor, ExpertRows, ExpertWeights], tuple[Tensor, Tensor | None]]


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


def library_choice(weights: ExpertWeights, num_experts: int, by_kernel: Mlp) -> LibraryChoice:
    """Returns the measured choice on the device of the weights; `by_kernel` is the other way."""
    case, device = library_case(weights, num_experts), weights.gate_up.device
    if reason := reason_against(case):
        return LibraryChoice(NEVER, reason)
    if device.type != "cuda":
        return LibraryChoice(NEVER, "nothing can be measured without a device")
    sizes = " x ".join(map(str, (num_experts, *case.widths)))
    name = f"{device_case(device, _sources())} torch {torch.__version__} {sizes}"
    try:
        rows = _known().of(name, lambda: _measured(weights, num_experts, by_kernel))
    except RuntimeError as error:  # also out of memory
        return LibraryChoice(NEVER, str(error).partition("\n")[0])
    return LibraryChoice(rows, "" if rows < NEVER else "it is slower, or wrong")


def least_rows(is_faster: Callable[[int], bool]) -> int:
    """Returns the least of NUM_ROWS from which on all are faster; NEVER if the most are not."""
    faster = takewhile(is_faster, reversed(NUM_ROWS))
    return min(faster, default=NEVER)


def even_rows(num_rows: int, num_experts: int, device: torch.device) -> ExpertRows:
    """Returns rows of as many tokens, as many of each expert as of every other."""
    numbers = torch.arange(num_experts + 1, device=device)
    tokens = torch.arange(num_rows, device=device)
    return ExpertRows(tokens, numbers * num_rows // num_experts, tokens.unsqueeze(1))


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether no result is missing, and all are equal but for rounding."""
    error = (found.float() - expected.float()).pow(2).mean().sqrt()
    return bool(error <= MOST_ERROR * expected.float().pow(2).mean().sqrt())


def _measured(weights: ExpertWeights, num_experts: int, by_kernel: Mlp) -> int:
    device, width = weights.gate_up.device, weights.gate_up.shape[1]

    def operands(num_rows: int) -> tuple[Tensor, ExpertRows, ExpertWeights]:
        x = torch.randn(num_rows, width, device=device).bfloat16()
        return x, even_rows(num_rows, num_experts, device), weights

    def is_faster(num_rows: int) -> bool:
        given = operands(num_rows)
        return milliseconds(lambda: by_library(*given)) < milliseconds(lambda: by_kernel(*given))

    checked = operands(CHECKED_ROWS)
    if not is_near(by_library(*checked)[0], by_kernel(*checked)[0]):
        return NEVER
    return least_rows(is_faster)


@cache
def _known() -> FusedRows:
    return FusedRows(cache_root() / "library_experts.json")


@cache
def _sources() -> tuple[Path, ...]:
    return tuple(Path(__file__).with_name(name) for name in SOURCES)
