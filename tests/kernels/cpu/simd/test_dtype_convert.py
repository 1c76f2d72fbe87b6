"""Up to 32 numbers of each dtype as one value; memory after them is unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.compile import compiled
from kernels.cpu.simd.dtype_convert import load_numbers, store_numbers
from kernels.cpu.simd.f32x32 import NUM_FLOATS, load_floats, store_floats, tanh_floats
from kernels.cpu.simd.intrinsics import array

COUNTS = [1, 7, 31, NUM_FLOATS, 50]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@compiled()
def _load(stored: Any, count: int, out: Any) -> None:
    store_floats(load_numbers(stored.ctypes.data, stored.dtype, count), out.ctypes.data)


@compiled()
def _store(x: Any, count: int, stored: Any) -> None:
    store_numbers(load_floats(x.ctypes.data), stored.ctypes.data, stored.dtype, count)


@compiled()
def _tanh(x: Any, out: Any) -> None:
    store_floats(tanh_floats(load_floats(x.ctypes.data)), out.ctypes.data)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_load_widens_first_numbers_and_zeroes_the_rest(dtype: torch.dtype, count: int) -> None:
    stored = torch.randn(NUM_FLOATS).to(dtype)
    out = np.full(NUM_FLOATS, np.nan, np.float32)
    _load(array(stored), count, out)
    expected = stored.float()
    expected[count:] = 0.0
    assert torch.equal(torch.from_numpy(out), expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_rounds_first_numbers_and_leaves_the_rest(dtype: torch.dtype, count: int) -> None:
    x = torch.randn(NUM_FLOATS)
    x[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, -torch.inf])
    stored = torch.full((NUM_FLOATS + 1,), 5.0, dtype=dtype)
    _store(x.numpy(), count, array(stored))
    expected = torch.full_like(stored, 5.0)
    num_stored = min(count, NUM_FLOATS)
    expected[:num_stored] = x[:num_stored].to(dtype)
    assert torch.equal(stored, expected)


def test_tanh_is_accurate_and_finite_far_from_zero() -> None:
    x = torch.linspace(-3, 3, NUM_FLOATS)
    x[:4] = torch.tensor([-torch.inf, -1e30, 1e30, torch.inf])
    out = np.empty(NUM_FLOATS, np.float32)
    _tanh(x.numpy(), out)
    expected = x.double().tanh().float()
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=3e-7)
