"""The result is bit-identical to `linear` with the dense weight, including NaN.

In BF16 under the interpreter, whose conversions differ from a GPU's: both kernels use the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.gemm.compressed_linear import compressed_linear
from kernels.gpu.gemm.decompress import decompress
from kernels.gpu.gemm.fused_rows import DEFAULT
from kernels.gpu.gemm.linear import linear
from kernels.reference.compressed_linear import compressed_linear as reference_compressed_linear
from kernels.split_weight import SplitWeight, split_weight
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.split_weights import bits_of, normal_weight, with_outliers
from tests.support.kernels.tolerance import assert_near

# (N, K): less than a tile, tiles and a remainder, K that ends within a group, a byte, a step
SHAPES = [(63, 100), (70, 600), (33, 1153), (1, 1)]
if not IS_INTERPRETED:
    SHAPES += [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096), (4000, 896)]
NUM_ROWS = [1, 17, 65, 130]
BF16 = torch.bfloat16


@pytest.fixture(params=[True, False], ids=["split", "not split"])
def is_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr("kernels.gpu.gemm.linear_tile.NUM_MULTIPROCESSORS", 1)
    return bool(request.param)


def _split(weight: Tensor) -> SplitWeight:
    split = split_weight(weight, is_always=True)
    assert split is not None
    return split


def _x(num_rows: int, width: int, device: torch.device) -> Tensor:
    return random(num_rows, width, like=device, dtype=BF16)


@pytest.mark.usefixtures("is_split")
@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_equal_those_of_linear(
    shape: tuple[int, int], num_rows: int, is_batch_invariant: bool, device: torch.device
) -> None:
    """With a bias for every second number of rows; one weight in 200 is any bit pattern."""
    weight = with_outliers(normal_weight(*shape), 0.005).to(device)
    x = _x(num_rows, shape[1], device)
    bias = random(shape[0], like=device, dtype=BF16, seed=2) if num_rows % 2 else None
    expected = linear(x, weight, bias, is_batch_invariant=is_batch_invariant)
    with poisoned_outputs():
        y = compressed_linear(x, _split(weight), bias, is_batch_invariant=is_batch_invariant)
    assert torch.equal(bits_of(y), bits_of(expected))


@pytest.mark.usefixtures("is_split")
@pytest.mark.parametrize(("place", "expected"), [(384, 2.0), (512, 0.0)])
def test_segment_is_summed_before_it_is_added(
    place: int, expected: float, device: torch.device
) -> None:
    """Segments of 256: in FP32, 2**24 + 1 + 1 - 2**24 is 0, and 2**24 + (1 + 1) - 2**24 is 2."""
    weight = torch.zeros(1, 1024, dtype=BF16, device=device)
    weight[:, 0], weight[:, 256], weight[:, place], weight[:, 768] = 2.0**24, 1.0, 1.0, -(2.0**24)
    x = torch.ones(1, 1024, dtype=BF16, device=device)
    assert compressed_linear(x, _split(weight), is_batch_invariant=True).item() == expected
    assert linear(x, weight, is_batch_invariant=True).item() == expected


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_wide_groups_and_only_wide_groups(share: float, device: torch.device) -> None:
    signs = torch.sign(normal_weight(40, 320)).float() + 0.5  # 1.5 and -0.5: one window
    weight = with_outliers(signs.bfloat16(), share).to(device)
    split = _split(weight)
    assert split.wide_share == share
    x = _x(5, 320, device)
    assert torch.equal(bits_of(compressed_linear(x, split)), bits_of(linear(x, weight)))


def test_products_are_near_fp64(device: torch.device) -> None:
    """Compares with FP64, not only with `linear`."""
    weight = normal_weight(70, 600) * 2
    x, bias = _x(9, 600, device), random(70, like=device, dtype=BF16, seed=2)
    exact = x.double().cpu() @ weight.double().T + bias.double().cpu()
    for op in (compressed_linear, reference_compressed_linear):
        assert_near(op(x, _split(weight.to(device)), bias), exact)


def test_row_bits_do_not_depend_on_the_number_of_rows(device: torch.device) -> None:
    weight = with_outliers(normal_weight(40, 1300), 1e-3).nan_to_num(0, 0, 0).to(device)
    split, x = _split(weight), _x(130, 1300, device)
    together = compressed_linear(x, split, is_batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 14), slice(60, 130)):
        alone = compressed_linear(x[rows], split, is_batch_invariant=True)
        assert torch.equal(alone, together[rows])


def test_slices_for_tensor_parallelism(device: torch.device) -> None:
    weight = with_outliers(normal_weight(90, 576), 0.005).to(device)
    split, x = _split(weight), _x(3, 576, device)
    full = compressed_linear(x, split)
    parts = [compressed_linear(x, split.rows(start, start + 45)) for start in (0, 45)]
    assert torch.equal(bits_of(torch.cat(parts, dim=1)), bits_of(full))
    for start, stop in ((0, 192), (192, 384), (384, 576)):
        y = compressed_linear(x[:, start:stop], split.columns(start, stop))
        expected = linear(x[:, start:stop], weight[:, start:stop])
        assert torch.equal(bits_of(y), bits_of(expected))


@pytest.mark.parametrize("num_rows", [3, DEFAULT + 1])
def test_ops_use_this_kernel(
    num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are fused, for many the weight is decompressed first: the bits are the same."""
    weight = with_outliers(normal_weight(40, 96), 0.005).to(device)
    split, x = _split(weight), _x(num_rows, 96, device)
    decompressed = []
    monkeypatch.setattr(ops, "fused_rows", lambda *_: DEFAULT)
    monkeypatch.setattr(ops, "decompress", lambda w: decompressed.append(w) or decompress(w))
    y = ops.compressed_linear(x, split, is_batch_invariant=True)
    assert torch.equal(bits_of(y), bits_of(linear(x, weight, is_batch_invariant=True)))
    assert len(decompressed) == (num_rows > DEFAULT)


def test_no_rows(device: torch.device) -> None:
    split = _split(normal_weight(3, 64).to(device))
    assert compressed_linear(_x(0, 64, device), split).shape == (0, 3)


def test_invalid_arguments_raise(device: torch.device) -> None:
    split, x = _split(normal_weight(3, 64).to(device)), _x(2, 64, device)
    with pytest.raises(BadTensor, match=r"x is torch.float16, not torch.bfloat16, the dtype of a"):
        compressed_linear(x.half(), split)
    with pytest.raises(BadTensor, match=r"x has shape \[2, 63\], not \[any, 64\]"):
        compressed_linear(x[:, :63], split)
    with pytest.raises(BadTensor, match=r"bias has shape \[2\], not \[3\]"):
        compressed_linear(x, split, torch.ones(2, device=device).bfloat16())
