"""When torch's grouped GEMM computes experts: where it can, and is right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.moe import library_experts
from kernels.gpu.moe.library_experts import (
    LibraryCase,
    by_library,
    library_case,
    reason_against,
)
from kernels.reference.gated import silu_and_mul
from kernels.reference.grouped_linear import expert_mlp as reference
from kernels.routing import ExpertWeights
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


def test_case_is_that_of_the_weights() -> None:
    assert library_case(made_weights(), NUM_EXPERTS)[1:] == (BF16, True, (HIDDEN, 2 * INNER, INNER))


def made_weights() -> ExpertWeights:
    shapes = [(NUM_EXPERTS * 2 * INNER, HIDDEN), (NUM_EXPERTS * HIDDEN, INNER)]
    shapes += [(2 * SHARED, HIDDEN), (HIDDEN, SHARED)]
    made = [
        random(*shape, like=CPU, dtype=BF16, seed=seed) * 0.1 for seed, shape in enumerate(shapes)
    ]
    return ExpertWeights(made[0], made[1], made[2], made[3], is_gelu=False)


@pytest.mark.parametrize("num_tokens", [1, 37])
def test_library_computes_the_reference(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts without rows, and one with a row of every token."""
    monkeypatch.setattr(library_experts, "silu_and_mul", silu_and_mul)
    x = random(num_tokens, HIDDEN, like=CPU, dtype=BF16, seed=9)
    rows, weights = expert_rows(num_tokens, is_skewed=True), made_weights()
    found, expected = by_library(x, rows, weights), reference(x, rows, weights)
    for each, wanted in zip(found, expected, strict=True):
        assert each is not None
        assert wanted is not None
        torch.testing.assert_close(each, wanted, rtol=2e-2, atol=2e-2)
