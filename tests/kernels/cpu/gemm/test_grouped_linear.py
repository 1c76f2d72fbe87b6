"""Products of experts: a row's bits are those of its expert's product alone, in every form."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.gemm.compressed_weight import compress_weight
from kernels.cpu.gemm.gemm_common import HALF_CHUNK_ROWS
from kernels.cpu.gemm.grouped_linear import grouped_linear, grouped_sums, pack_experts
from kernels.cpu.gemm.lane_linear import lane_linear, pack_lanes
from kernels.cpu.gemm.linear import is_packed
from kernels.ops import packed_form
from kernels.reference.grouped_linear import grouped_sums as reference_sums
from kernels.sum_lanes import SumLanes, add_lanes
from tests.kernels.support.compiled_first import compile_experts_first
from tests.kernels.support.expert_inputs import (
    LANES,
    NUM_COLUMNS,
    NUM_EXPERTS,
    expert_operands,
    expert_rows,
)
from tests.support.kernels.inputs import poisoned_outputs
from tests.support.threads import computing_threads

DTYPES = (torch.bfloat16, torch.float32)
LONG_FP32 = pytest.param(torch.float32, marks=pytest.mark.long)  # 3 s to compile


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_experts_first()


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> SumLanes:
    return LANES[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("has_kernels", [True, False], ids=["packed", "library"])
@pytest.mark.parametrize("num_tokens", [1, 33, HALF_CHUNK_ROWS + 1])
def test_products_match_the_reference(
    lanes: SumLanes, dtype: torch.dtype, num_tokens: int, has_kernels: bool
) -> None:
    x, weight = expert_operands(lanes, dtype, num_tokens)
    rows = expert_rows(num_tokens, is_skewed=True)
    packed = pack_experts(weight, has_kernels=has_kernels)
    with poisoned_outputs():
        sums = grouped_sums(x, rows.tokens, rows.offsets, packed, lanes=lanes, num_sums=lanes.num)
        y = grouped_linear(x, rows.tokens, rows.offsets, packed, lanes=lanes)
    expected = reference_sums(x, rows.tokens, rows.offsets, weight, lanes=lanes, num_sums=lanes.num)
    assert torch.allclose(sums, expected, rtol=1e-4, atol=1e-4)
    rounded = add_lanes(sums)[0].to(dtype)
    is_near = not is_packed(packed) and torch.allclose(y, rounded, atol=0.02)
    assert torch.equal(y, rounded) or is_near


def expert_alone(x: torch.Tensor, weight: torch.Tensor, lanes: SumLanes) -> torch.Tensor:
    """Where this CPU has no kernels, the library multiplies with a dense weight, which the library
    of `lane_linear` widens first.
    """
    packed = pack_experts(weight, has_kernels=True)
    if is_packed(packed):
        return lane_linear(x, pack_lanes(weight, lanes, has_kernels=True), lanes=lanes)
    return grouped_linear(x, None, torch.tensor([0, len(x)]), packed, lanes=lanes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, LONG_FP32], ids=str)
def test_row_has_the_bits_of_its_expert_alone(lanes: SumLanes, dtype: torch.dtype) -> None:
    """Whether its expert has one row or all, on one thread or two."""
    x, weight = expert_operands(lanes, dtype, 70)
    packed = pack_experts(weight, has_kernels=True)
    alone = [expert_alone(x, part.contiguous(), lanes) for part in weight.split(NUM_COLUMNS)]
    for num_threads, is_skewed in ((1, False), (2, True)):
        rows = expert_rows(70, is_skewed=is_skewed)
        with computing_threads(num_threads):
            y = grouped_linear(x, rows.tokens, rows.offsets, packed, lanes=lanes)
        for expert in range(NUM_EXPERTS):
            own = slice(int(rows.offsets[expert]), int(rows.offsets[expert + 1]))
            assert torch.equal(y[own], alone[expert][rows.tokens[own]])


@pytest.mark.long
def test_compressed_weight_has_the_same_bits(lanes: SumLanes) -> None:
    x, weight = expert_operands(lanes, torch.bfloat16, 35)
    rows = expert_rows(35)
    compressed = compress_weight(weight)
    assert compressed is not None
    if packed_form(compressed) is None:
        pytest.skip("this CPU has no products of compressed weights")
    full = pack_experts(weight, has_kernels=True)
    expected = grouped_linear(x, rows.tokens, rows.offsets, full, lanes=lanes)
    found = grouped_linear(x, rows.tokens, rows.offsets, compressed, lanes=lanes)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_rank_computes_its_subtree_alone(dtype: torch.dtype, num_ranks: int) -> None:
    lanes = LANES["lanes"]
    x, weight = expert_operands(lanes, dtype, 9)
    rows = expert_rows(9)
    packed = pack_experts(weight, has_kernels=True)
    expected = grouped_sums(x, rows.tokens, rows.offsets, packed, lanes=lanes, num_sums=num_ranks)
    for rank in range(num_ranks):
        first, end = rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks
        columns = slice(lanes.borders[first], lanes.borders[end])
        if columns.start == columns.stop:
            assert not expected[rank].any()
            continue
        own = pack_experts(weight[:, columns].contiguous(), has_kernels=True)
        part = x[:, columns].contiguous()
        found = grouped_sums(part, rows.tokens, rows.offsets, own, lanes=lanes.part(first, end))
        assert torch.equal(found[0], expected[rank])


def test_rows_without_places_are_all_rows(dtype: torch.dtype) -> None:
    lanes = LANES["one"]
    x, weight = expert_operands(lanes, dtype, 20)
    rows = expert_rows(20)
    packed = pack_experts(weight, has_kernels=True)
    expected = grouped_linear(x, rows.tokens, rows.offsets, packed, lanes=lanes)
    own = x.index_select(0, rows.tokens)
    assert torch.equal(grouped_linear(own, None, rows.offsets, packed, lanes=lanes), expected)
