"""Sums in lanes: the bits of the reference's order, of every rank, and of split weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.gemm.compressed_linear import compressed_linear, fits_lanes
from kernels.gpu.gemm.lane_linear import lane_linear, lane_sums
from kernels.gpu.gemm.linear import launch
from kernels.gpu.gemm.linear_tile import Tiling
from kernels.reference.lane_linear import lane_sums as reference_sums
from kernels.split_weight import split_weight
from kernels.sum_lanes import SumLanes, add_lanes
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.split_weights import bits_of
from tests.support.kernels.tolerance import assert_near

# Lanes of equal width; uneven ones of 32 columns, of a step's part and longer; empty ones.
LANES = {
    "uneven": SumLanes.of((0, 32, 96, 96, 128, 288, 288, 480, 512)),
    "groups of 64": SumLanes.of((0, 64, 128, 256, 320, 448, 576, 576, 704)),
    "one": SumLanes.of((0, 0, 0, 0, 0, 0, 0, 0, 40)),
    "even": SumLanes.of(range(0, 1025, 128)),
}
NUM_COLUMNS = 70
MAX_ROWS = 70 if IS_INTERPRETED else 3000
NUM_SUMS = (2,) if IS_INTERPRETED else (1, 2, 4)


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> SumLanes:
    return LANES[request.param]


@pytest.fixture(params=[True, False], ids=["split", "not split"])
def is_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether each lane is computed by a program of its own."""
    if not request.param:
        monkeypatch.setattr("kernels.gpu.gemm.linear_tile.NUM_MULTIPROCESSORS", 1)
    return bool(request.param)


def operands(
    num_rows: int, lanes: SumLanes, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = random(num_rows, lanes.width, like=device, dtype=dtype)
    weight = random(NUM_COLUMNS, lanes.width, like=device, dtype=torch.float32, seed=1)
    bias = random(NUM_COLUMNS, like=device, dtype=dtype, seed=2)
    return x, (weight * lanes.width**-0.5).to(dtype), bias


@pytest.mark.parametrize("num_rows", [1, 33 if IS_INTERPRETED else 65])
def test_sums_match_the_reference(
    lanes: SumLanes, num_rows: int, is_split: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands(num_rows, lanes, device, dtype)
    with poisoned_outputs():
        sums = lane_sums(x, weight, lanes=lanes, num_sums=8)
        y = lane_linear(x, weight, bias, lanes=lanes)
    expected = reference_sums(x.cpu(), weight.cpu(), lanes=lanes, num_sums=8)
    assert sums.dtype == torch.float32
    assert torch.allclose(sums.cpu(), expected, rtol=1e-3, atol=1e-3)
    for num_sums in NUM_SUMS:
        found = lane_sums(x, weight, lanes=lanes, num_sums=num_sums)
        assert torch.equal(found, add_lanes(sums, num_sums))
    total = add_lanes(sums)[0].to(dtype)
    assert torch.equal(y, total + bias)
    assert_near(y, x.double().cpu() @ weight.double().cpu().T + bias.double().cpu())


@pytest.mark.each_value(1)
def test_row_bits_do_not_depend_on_the_number_of_rows(
    lanes: SumLanes, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = operands(MAX_ROWS, lanes, device, dtype)
    together = lane_linear(x, weight, bias, lanes=lanes)
    monkeypatch.setattr("kernels.gpu.gemm.linear_tile.NUM_MULTIPROCESSORS", 1)
    assert torch.equal(lane_linear(x, weight, bias, lanes=lanes), together)
    for num_rows in (7, 63):
        rows = slice(MAX_ROWS - num_rows, MAX_ROWS)
        assert torch.equal(lane_linear(x[rows], weight, bias, lanes=lanes), together[rows])


@pytest.mark.parametrize("num_parts", [2, 4])
def test_bits_do_not_depend_on_the_parts_of_a_tile(
    num_parts: int, dtype: torch.dtype, device: torch.device
) -> None:
    lanes = LANES["even"]
    x, weight, bias = operands(70, lanes, device, dtype)
    together, divided = torch.empty(2, 70, NUM_COLUMNS, dtype=dtype, device=device)
    tiled = Tiling(64, 32, 64, 4, 2, is_split=False)
    for out, each in ((together, tiled), (divided, tiled._replace(lane_parts=num_parts))):
        launch(x, weight, bias, each, out, is_batch_invariant=True, lanes=lanes)
    assert torch.equal(divided, together)


@pytest.mark.usefixtures("is_split")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rank_computes_its_subtree_alone(
    lanes: SumLanes, num_ranks: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, _ = operands(5, lanes, device, dtype)
    expected = lane_sums(x, weight, lanes=lanes, num_sums=num_ranks)
    for rank in range(num_ranks):
        first, end = rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks
        columns = slice(lanes.borders[first], lanes.borders[end])
        if columns.start == columns.stop:
            assert not expected[rank].any()
            continue
        part = lanes.part(first, end)
        found = lane_sums(x[:, columns], weight[:, columns], lanes=part)
        assert torch.equal(found[0], expected[rank])
        rounded = lane_linear(x[:, columns], weight[:, columns], lanes=part)
        assert torch.equal(rounded, expected[rank].to(dtype))


@pytest.mark.usefixtures("is_split")
@pytest.mark.parametrize("num_rows", [1, 66])
def test_split_weight_has_the_same_bits(
    lanes: SumLanes, num_rows: int, device: torch.device
) -> None:
    x, weight, bias = operands(num_rows, lanes, device, torch.bfloat16)
    weight[3, 5] = 2.0**-90  # its group is wide
    split = split_weight(weight, is_always=True)
    assert split is not None
    expected = lane_linear(x, weight, bias, lanes=lanes)
    found = ops.compressed_lane_linear(x, split, bias, lanes=lanes)
    assert torch.equal(bits_of(found), bits_of(expected))
    if fits_lanes(lanes):
        fused = compressed_linear(x, split, bias, lanes=lanes)
        assert torch.equal(bits_of(fused), bits_of(expected))


def test_lanes_of_whole_groups_need_no_decompression() -> None:
    assert {name: fits_lanes(each) for name, each in LANES.items()} == {
        "even": True,
        "uneven": False,
        "groups of 64": True,
        "one": False,
    }


def test_wrong_lanes_raise(device: torch.device) -> None:
    x, weight, _ = operands(2, LANES["even"], device, torch.float32)
    with pytest.raises(BadTensor, match="end at column 512, not 1024"):
        lane_linear(x, weight, lanes=LANES["uneven"])


def test_ops_use_this_kernel(device: torch.device) -> None:
    x, weight, bias = operands(5, LANES["uneven"], device, torch.float32)
    y = ops.lane_linear(x, weight, bias, lanes=LANES["uneven"])
    assert torch.equal(y, lane_linear(x, weight, bias, lanes=LANES["uneven"]))
