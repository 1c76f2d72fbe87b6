"""32 numbers as one value: arithmetic, BF16, powers of two, a row of scores and its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cpu.compile import compiled
from kernels.cpu.simd.cpu_features import has_pair_products
from kernels.cpu.simd.f32x32 import (
    NUM_FLOATS,
    exp2_floats,
    fma_floats,
    larger,
    largest,
    load_floats,
    load_halves,
    masked,
    same,
    smaller,
    store_floats,
    store_halves,
    total,
    weights_of,
)
from kernels.cpu.simd.intrinsics import exp2

pytestmark = pytest.mark.skipif(not has_pair_products(), reason="needs AVX-512 BF16")
FLOATS = np.float32


@compiled()
def _compute(a: Any, b: Any, out: Any) -> None:
    x, y = load_floats(a.ctypes.data), load_floats(b.ctypes.data)
    store_floats(x + y, out[0].ctypes.data)
    store_floats(x - y, out[1].ctypes.data)
    store_floats(x * y, out[2].ctypes.data)
    store_floats(x / y, out[3].ctypes.data)
    store_floats(fma_floats(x, y, x), out[4].ctypes.data)
    store_floats(smaller(x, y), out[5].ctypes.data)
    store_floats(larger(x, y), out[6].ctypes.data)
    store_floats(same(b[3]) + x * b[1], out[7].ctypes.data)


@compiled()
def _bf16_round_trip(x: Any, out: Any) -> None:
    store_halves(load_floats(x.ctypes.data), out.ctypes.data)
    store_floats(load_halves(out.ctypes.data), x.ctypes.data)


@compiled()
def _powers(x: Any, out: Any, scalar: Any) -> None:
    store_floats(exp2_floats(load_floats(x.ctypes.data)), out.ctypes.data)
    for index in range(len(x)):
        scalar[index] = exp2(x[index])


@compiled()
def _softmax(scores: Any, start: int, end: int, factor: Any, weights: Any) -> Any:
    """The largest score, and the sum of the stored weights 2**(factor * (score - largest))."""
    visible = masked(load_floats(scores.ctypes.data), start, end)
    top = largest(visible)
    visible = weights_of(visible, factor, top * factor)
    store_halves(visible, weights.ctypes.data)
    return top, total(visible)


def normal(seed: int, scale: float = 1.0) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(0, scale, NUM_FLOATS).astype(FLOATS)


def bf16(x: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16()


def test_arithmetic_equals_numpy() -> None:
    a, b = normal(0), normal(1)
    out = np.empty((8, NUM_FLOATS), FLOATS)
    _compute(a, b, out)
    fused = (a.astype(np.float64) * b + a).astype(FLOATS)
    expected = [a + b, a - b, a * b, a / b, fused, np.minimum(a, b), np.maximum(a, b)]
    for actual, reference in zip(out, [*expected, b[3] + a * b[1]], strict=True):
        np.testing.assert_array_equal(actual, reference)


def test_bf16_is_rounded_to_nearest_even() -> None:
    x = normal(2)
    x[:4] = 1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf
    expected, out = bf16(x), np.empty(NUM_FLOATS, np.uint16)
    _bf16_round_trip(x, out)
    assert torch.equal(torch.from_numpy(out.view(np.int16)).view(torch.bfloat16), expected)
    np.testing.assert_array_equal(x, expected.float().numpy())


def test_vector_exp2_equals_scalar_exp2() -> None:
    x = normal(3, scale=50)
    x[:5] = -np.inf, 128, -127, -126, 0
    x = np.minimum(x, FLOATS(128))
    out, scalar = np.empty_like(x), np.empty_like(x)
    _powers(x, out, scalar)
    np.testing.assert_array_equal(out.view(np.int32), scalar.view(np.int32))


@pytest.mark.parametrize(("start", "end"), [(0, NUM_FLOATS), (0, 1), (7, 25), (31, 32)])
def test_softmax_weights_of_scores(start: int, end: int) -> None:
    scores, weights = normal(4, scale=20), np.zeros(NUM_FLOATS, np.uint16)

    top, summed = _softmax(scores, start, end, FLOATS(0.7), weights)

    visible = scores[start:end].astype(np.float64)
    expected = np.zeros(NUM_FLOATS)
    expected[start:end] = 2.0 ** (0.7 * (visible - visible.max()))
    assert top == scores[start:end].max()
    assert summed == pytest.approx(expected.sum(), rel=1e-5)
    actual = torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16).double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=2**-8, atol=2.0**-126)
    assert not actual[:start].any() and not actual[end:].any()


def test_weight_far_below_the_largest_score_is_zero() -> None:
    scores = np.array([-np.inf, -1e30, -127.0, -126.0] * (NUM_FLOATS // 4), FLOATS)
    scores[0] = 0.0
    weights = np.zeros(NUM_FLOATS, np.uint16)
    _, summed = _softmax(scores, 0, NUM_FLOATS, FLOATS(1), weights)
    assert summed == 1.0
    assert weights[:3].tolist() == [0x3F80, 0, 0]
