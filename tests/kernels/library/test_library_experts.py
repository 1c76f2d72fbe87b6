"""When torch's grouped GEMM computes experts: where it can, is right, and is the faster one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.gpu.moe import library_experts
from kernels.gpu.moe.library_experts import (
    NUM_ROWS,
    LibraryCase,
    by_library,
    least_rows,
    library_choice,
    reason_against,
)
from kernels.reference.gated import silu_and_mul
from kernels.reference.grouped_linear import expert_mlp as reference
from kernels.routing import NEVER, ExpertRows, ExpertWeights
from tests.kernels.support.expert_inputs import NUM_EXPERTS, expert_rows
from tests.support.kernels.inputs import random

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HIDDEN, INNER, SHARED = 64, 40, 24
H100 = LibraryCase(90, BF16, has_grouped_mm=True, widths=(2048, 1536, 768))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (H100, ""),
        (H100._replace(capability=100), ""),
        (H100._replace(capability=80), "waits for a device of compute capability 8.0"),
        (H100._replace(capability=120), "waits for a device of compute capability 12.0"),
        (H100._replace(has_grouped_mm=False), "this torch has no grouped_mm"),
        (H100._replace(dtype=torch.float16), "multiplies BF16, not torch.float16"),
        (H100._replace(widths=(2048, 1536, 764)), "not of 764 elements"),
    ],
)
def test_library_multiplies_where_nothing_waits(case: LibraryCase, reason: str) -> None:
    found = reason_against(case)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("first", [*NUM_ROWS, NEVER])
def test_library_has_the_rows_from_which_on_it_is_faster(first: int) -> None:
    assert least_rows(lambda num_rows: num_rows >= first) == first
    assert least_rows(lambda num_rows: num_rows < max(NUM_ROWS)) == NEVER


def made_weights() -> ExpertWeights:
    shapes = [(NUM_EXPERTS * 2 * INNER, HIDDEN), (NUM_EXPERTS * HIDDEN, INNER)]
    shapes += [(2 * SHARED, HIDDEN), (HIDDEN, SHARED)]
    made = [
        random(*shape, like=CPU, dtype=BF16, seed=seed) * 0.1 for seed, shape in enumerate(shapes)
    ]
    return ExpertWeights(made[0], made[1], made[2], made[3], is_gelu=False)


@pytest.fixture
def _gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_experts, "silu_and_mul", silu_and_mul)


@pytest.mark.usefixtures("_gates")
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_library_computes_the_reference(num_tokens: int) -> None:
    """Experts without rows, and one with a row of every token."""
    x = random(num_tokens, HIDDEN, like=CPU, dtype=BF16, seed=9)
    rows, weights = expert_rows(num_tokens, is_skewed=True), made_weights()
    found, expected = by_library(x, rows, weights), reference(x, rows, weights)
    for each, wanted in zip(found, expected, strict=True):
        assert each is not None
        assert wanted is not None
        torch.testing.assert_close(each, wanted, rtol=2e-2, atol=2e-2)


def halved(x: Tensor, rows: ExpertRows, weights: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    return reference(x, rows, weights)[0] / 2, None


def missing(x: Tensor, rows: ExpertRows, weights: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    return reference(x, rows, weights)[0] * torch.nan, None


@pytest.mark.usefixtures("_gates")
@pytest.mark.parametrize(
    ("by_kernel", "rows"), [(reference, 4096), (halved, NEVER), (missing, NEVER)]
)
def test_library_is_used_once_its_results_are_the_kernels(
    by_kernel: library_experts.Mlp, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second, and the kernel one for 1,024 rows."""
    monkeypatch.setattr(library_experts, "NUM_ROWS", (64, 4096))
    monkeypatch.setattr(library_experts, "CHECKED_ROWS", 64)
    times = iter((1.0, 4.0, 1.0, 0.06))
    monkeypatch.setattr(library_experts, "milliseconds", lambda _: next(times))
    assert library_experts._measured(made_weights(), NUM_EXPERTS, by_kernel) == rows


@pytest.mark.parametrize(
    ("capability", "reason"), [(80, "compute capability 8.0"), (90, "without a device")]
)
def test_nothing_is_measured_where_it_cannot_be(
    capability: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_experts, "compute_capability", lambda _: capability)
    choice = library_choice(made_weights(), NUM_EXPERTS, reference)
    assert choice.rows == NEVER
    assert reason in choice.reason
