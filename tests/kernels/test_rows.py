"""Rows in vector registers against FP64: largest lane, sum, power of two, BF16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.amx import has_amx
from kernels.cpu.compiled import compiled
from kernels.cpu.rows import (
    ROW_LANES,
    exp2_row,
    largest,
    load_row,
    mask_row,
    store_as_bf16,
    total,
)

pytestmark = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")


@compiled()
def _soften(scores: Any, start: int, end: int, factor: Any, weights: Any) -> Any:
    """Largest score and sum of the weights 2**(factor * (score - largest)), which are stored."""
    row = mask_row(load_row(scores.ctypes.data), start, end)
    top = largest(row)
    row = exp2_row(row, factor, top * factor)
    store_as_bf16(row, weights.ctypes.data)
    return top, total(row)


@pytest.mark.parametrize(("start", "end"), [(0, ROW_LANES), (0, 1), (31, 97), (127, 128)])
def test_a_row_becomes_weights(start: int, end: int) -> None:
    scores = np.random.default_rng(0).normal(0, 20, ROW_LANES).astype(np.float32)
    weights = np.zeros(ROW_LANES, np.uint16)

    top, summed = _soften(scores, start, end, np.float32(0.7), weights)

    seen = scores[start:end].astype(np.float64)
    expected = np.zeros(ROW_LANES)
    expected[start:end] = 2.0 ** (0.7 * (seen - seen.max()))
    assert top == scores[start:end].max()
    assert summed == pytest.approx(expected.sum(), rel=1e-5)
    got = torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16).double().numpy()
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=2.0**-126)
    assert not got[:start].any() and not got[end:].any()


def test_far_below_the_largest_score_a_weight_is_zero() -> None:
    scores = np.array([-np.inf, -1e30, -127.0, -126.0] * (ROW_LANES // 4), np.float32)
    scores[0] = 0.0
    weights = np.zeros(ROW_LANES, np.uint16)
    _, summed = _soften(scores, 0, ROW_LANES, np.float32(1), weights)
    assert summed == 1.0
    assert weights[:3].tolist() == [0x3F80, 0, 0]
