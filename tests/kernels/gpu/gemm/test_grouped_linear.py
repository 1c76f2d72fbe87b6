"""Products of experts: the reference's sums, whatever the other rows, and of every rank."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.gpu.gemm.grouped_linear import grouped_linear, grouped_sums
from kernels.gpu.gemm.lane_linear import lane_linear
from kernels.reference.grouped_linear import grouped_sums as reference_sums
from kernels.sum_lanes import SumLanes, add_lanes
from tests.kernels.support.expert_inputs import (
    LANES,
    NUM_EXPERTS,
    expert_operands,
    expert_rows,
)
from tests.support.kernels.inputs import poisoned_outputs

NUM_COLUMNS = 70


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> SumLanes:
    return LANES[request.param]


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_products_match_the_reference(
    lanes: SumLanes, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (each.to(device) for each in expert_operands(lanes, dtype, num_tokens, NUM_COLUMNS))
    rows = [each.to(device) for each in expert_rows(num_tokens, is_skewed=True)[:2]]
    with poisoned_outputs():
        sums = grouped_sums(x, *rows, weight, lanes=lanes, num_sums=lanes.num)
        y = grouped_linear(x, *rows, weight, lanes=lanes)
    operands = x.cpu(), *(each.cpu() for each in rows), weight.cpu()
    expected = reference_sums(*operands, lanes=lanes, num_sums=lanes.num)
    assert torch.allclose(sums.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(y, add_lanes(sums)[0].to(dtype))


def test_row_bits_do_not_depend_on_other_rows(
    lanes: SumLanes, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (each.to(device) for each in expert_operands(lanes, dtype, 40, NUM_COLUMNS))
    tokens, offsets, _ = (each.to(device) for each in expert_rows(40, is_skewed=True))
    y = grouped_linear(x, tokens, offsets, weight, lanes=lanes)
    for expert in range(NUM_EXPERTS):
        bounds = torch.zeros_like(offsets)
        bounds[expert + 1 :] = 1
        own = range(int(offsets[expert]), int(offsets[expert + 1]))
        for row in own[:2]:
            alone = grouped_linear(x, tokens[row : row + 1], bounds, weight, lanes=lanes)
            assert torch.equal(alone[0], y[row])


def test_rank_computes_its_subtree_alone(dtype: torch.dtype, device: torch.device) -> None:
    lanes = LANES["lanes"]
    x, weight = (each.to(device) for each in expert_operands(lanes, dtype, 5, NUM_COLUMNS))
    rows = [each.to(device) for each in expert_rows(5)[:2]]
    expected = grouped_sums(x, *rows, weight, lanes=lanes, num_sums=2)
    for rank in range(2):
        columns = slice(lanes.borders[4 * rank], lanes.borders[4 * rank + 4])
        part = lanes.part(4 * rank, 4 * rank + 4)
        found = grouped_sums(x[:, columns], *rows, weight[:, columns], lanes=part)
        assert torch.equal(found[0], expected[rank])


def test_all_rows_without_places(dtype: torch.dtype, device: torch.device) -> None:
    lanes = LANES["one"]
    x, weight = (each.to(device) for each in expert_operands(lanes, dtype, 9, NUM_COLUMNS))
    tokens, offsets, _ = (each.to(device) for each in expert_rows(9))
    expected = grouped_linear(x, tokens, offsets, weight, lanes=lanes)
    own = x.index_select(0, tokens)
    assert torch.equal(grouped_linear(own, None, offsets, weight, lanes=lanes), expected)
    own_rows = lane_linear(own[:1], weight[: NUM_COLUMNS * NUM_EXPERTS], lanes=lanes)
    assert own_rows.shape == (1, NUM_COLUMNS * NUM_EXPERTS)


def test_wrong_lanes_raise(device: torch.device) -> None:
    x, weight = (each.to(device) for each in expert_operands(LANES["one"], torch.float32, 2))
    rows = [each.to(device) for each in expert_rows(2)[:2]]
    with pytest.raises(BadTensor, match="end at column 288, not 96"):
        grouped_linear(x, *rows, weight, lanes=LANES["lanes"])


def test_ops_use_this_kernel(device: torch.device) -> None:
    x, weight = (each.to(device) for each in expert_operands(LANES["one"], torch.float32, 3))
    rows = [each.to(device) for each in expert_rows(3)[:2]]
    y = ops.grouped_linear(x, *rows, weight, lanes=LANES["one"])
    assert torch.equal(y, grouped_linear(x, *rows, weight, lanes=LANES["one"]))
