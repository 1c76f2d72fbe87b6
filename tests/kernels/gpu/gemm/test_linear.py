from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.gemm.linear import linear
from kernels.gpu.gemm.linear_tile import store_tile
from kernels.reference.linear import linear as reference_linear
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

# (N, K): less than a tile, tiles and a remainder
SHAPES = [(63, 100), (100, 600), (1, 1)]
if not IS_INTERPRETED:
    SHAPES += [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096)]
MAX_ROWS = 70 if IS_INTERPRETED else 3000
FEWER_ROWS = (7, 65) if IS_INTERPRETED else (1, 7, 63, 100)


@pytest.fixture(params=[True, False], ids=["split", "not split"])
def is_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a GPU with a single multiprocessor, the segments of a small product are not split."""
    if not request.param:
        monkeypatch.setattr("kernels.gpu.gemm.linear_tile.NUM_MULTIPROCESSORS", 1)
    return bool(request.param)


def _operands(
    num_rows: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose products have a standard deviation of 1."""
    num_columns, width = shape
    x = random(num_rows, width, like=device, dtype=dtype)
    weight = random(num_columns, width, like=device, dtype=torch.float32, seed=1) * width**-0.5
    return x, weight.to(dtype), random(num_columns, like=device, dtype=dtype, seed=2)


@pytest.mark.usefixtures("is_split")
@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 63, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(
    shape: tuple[int, int],
    num_rows: int,
    has_bias: bool,
    is_batch_invariant: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x, weight, bias = _operands(num_rows, shape, device, dtype)
    bias_or_none = bias if has_bias else None
    with poisoned_outputs():
        y = linear(x, weight, bias_or_none, is_batch_invariant=is_batch_invariant)
    exact = x.double().cpu() @ weight.double().cpu().T
    assert y.dtype == dtype
    assert_near(y, exact + (bias.double().cpu() if has_bias else 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_bits_do_not_depend_on_the_number_of_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on whether a program computes all segments or one."""
    x, weight, bias = _operands(MAX_ROWS, shape, device, dtype)
    together = linear(x, weight, bias, is_batch_invariant=True)
    monkeypatch.setattr("kernels.gpu.gemm.linear_tile.NUM_MULTIPROCESSORS", 4)
    for num_rows in FEWER_ROWS:
        for first in {0, MAX_ROWS - num_rows}:
            rows = slice(first, first + num_rows)
            alone = linear(x[rows], weight, bias, is_batch_invariant=True)
            assert torch.equal(alone, together[rows]), num_rows


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_segment_is_summed_before_it_is_added(
    is_batch_invariant: bool, is_split: bool, device: torch.device
) -> None:
    """2**24 + 1 + 1 is 2**24 in FP32; 2**24 + (1 + 1) is not."""
    x = torch.ones(1, 1024, device=device)
    weight = torch.zeros(1, 1024, device=device)
    weight[:, 0], weight[:, 256], weight[:, 320] = 2.0**24, 1.0, 1.0
    y = linear(x, weight, is_batch_invariant=is_batch_invariant)
    assert y.item() - 2.0**24 == (2.0 if is_batch_invariant or is_split else 0.0)


@pytest.mark.usefixtures("is_split")
def test_bias_is_added_to_the_rounded_product(device: torch.device) -> None:
    """1 + 2**-11 + 2**-11 is 1 in FP16, if rounded after each sum."""
    x = torch.tensor([[1.0, 2.0**-11]], device=device, dtype=torch.float16)
    weight = torch.ones(5, 2, device=device, dtype=torch.float16)
    bias = torch.full((5,), 2.0**-11, device=device, dtype=torch.float16)
    for op in (linear, reference_linear):
        assert op(x, weight, bias).tolist() == [[1.0] * 5]


def test_non_contiguous_rows(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, _ = _operands(5, (40, 96), device, dtype)
    wide, tall = torch.cat((x, x), dim=1), torch.cat((weight, weight), dim=1)
    assert torch.equal(linear(wide[:, :96], tall[:, :96]), linear(x, weight))


def test_nan_stays_in_its_row(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, _ = _operands(20, (40, 100), device, dtype)
    expected = linear(x, weight)
    x[7, 3] = float("nan")
    y = linear(x, weight)
    assert y[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(y[others], expected[others])


@triton.jit
def _store_last_kernel(address, num_rows, num_columns, num_parts: tl.constexpr):
    """Stores the last 16 rows and columns of each part of [num_parts, num_rows, num_columns]."""
    last = tl.arange(0, 16) - 16
    acc = tl.full((16, 16), 1.0, tl.float32) + tl.program_id(1)
    out_ptr = address.to(tl.pointer_type(tl.float32))
    row, column = num_rows + last, num_columns + last
    store_tile(acc, None, out_ptr, row, column, num_rows, num_columns, False, num_parts)


def test_parts_may_have_more_sums_than_32_bits_count(tmp_path: Path, device: torch.device) -> None:
    """8 sums of 16,384 rows by 18,944 columns are written within memory of twice their size. The
    interpreter copies a tensor that it is given, so the kernel gets an address in a sparse file.
    """
    num_parts, num_rows, num_columns = 8, 16_384, 18_944
    size = num_parts * num_rows * num_columns
    if device.type == "cpu":
        memory = torch.from_file(str(tmp_path / "sums"), shared=True, size=2 * size)
        (tmp_path / "sums").unlink()  # it stays mapped, and no tool copies 20 GB of zeros
    else:
        memory = torch.zeros(2 * size, device=device)
    sums = memory[size:].view(num_parts, num_rows, num_columns)
    _store_last_kernel[(1, num_parts)](sums.data_ptr(), num_rows, num_columns, num_parts=num_parts)
    assert sums[:, -1, -1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_ops_use_this_kernel(device: torch.device) -> None:
    """Interpreted, weights stay unpacked; on CUDA, only the batch-invariant product is this one."""
    x, weight, bias = _operands(5, (64, 96), device, torch.float32)
    y = ops.linear(x, ops.pack_weight(weight), bias, is_batch_invariant=True)
    assert torch.equal(y, linear(x, weight, bias, is_batch_invariant=True))
    assert_near(ops.linear(x, ops.pack_weight(weight), bias), y)


def test_no_rows(device: torch.device) -> None:
    weight = torch.ones(3, 8, device=device)
    assert linear(torch.ones(0, 8, device=device), weight).shape == (0, 3)


def test_invalid_arguments_raise(device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(3, 8, device=device)
    with pytest.raises(BadTensor, match=r"weight has shape \[3, 7\], not \[any, 8\]"):
        linear(x, weight[:, :7])
    with pytest.raises(BadTensor, match=r"weight is torch.float16, not torch.float32"):
        linear(x, weight.half())
    with pytest.raises(BadTensor, match=r"bias has shape \[2\], not \[3\]"):
        linear(x, weight, torch.ones(2, device=device))
    with pytest.raises(BadTensor, match=r"weight is not dense in its last dimension"):
        linear(x, torch.ones(8, 3, device=device).t())
    with pytest.raises(BadTensor, match=r"x has shape \[2, 1, 8\], not \[any, any\]"):
        linear(x[:, None], weight)
