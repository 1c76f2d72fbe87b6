"""Sums in lanes: every form of a weight, and every rank, has the bits of the full product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.cpu.gemm.avx512_bf16_gemm import can_pack_pairs, pack_pairs
from kernels.cpu.gemm.compressed_weight import compress_weight
from kernels.cpu.gemm.gemm_common import HALF_CHUNK_ROWS
from kernels.cpu.gemm.lane_linear import LibraryLanes, lane_linear, lane_sums, pack_lanes
from kernels.ops import packed_form
from kernels.reference.lane_linear import lane_sums as reference_sums
from kernels.sum_lanes import SumLanes, add_lanes
from tests.support.threads import computing_threads

NUM_COLUMNS = 96
# Widths of lanes: some are empty; longer than a piece that stays in the L1 cache; no blocks of 32.
LANES = {
    "blocks": SumLanes.of((0, 32, 96, 96, 128, 160, 224, 256, 288)),
    "long": SumLanes.of((0, 0, 0, 0, 320, 320, 320, 320, 992)),
    "heads of 20": SumLanes.of((0, 20, 40, 60, 60, 80, 100, 120, 140)),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
rng = torch.Generator()


def operands(lanes: SumLanes, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor]:
    rng.manual_seed(num_rows)
    x = torch.randn(num_rows, lanes.width, generator=rng)
    weight = torch.randn(NUM_COLUMNS, lanes.width, generator=rng) * 0.05
    return x.to(dtype), weight.to(dtype)


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest) -> SumLanes:
    return LANES[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("num_rows", [1, 33, HALF_CHUNK_ROWS + 1])
def test_sums_of_lanes_match_the_reference(
    lanes: SumLanes, dtype: torch.dtype, num_rows: int
) -> None:
    x, weight = operands(lanes, dtype, num_rows)
    packed = pack_lanes(weight, lanes, has_kernels=True)
    sums = lane_sums(x, packed, lanes=lanes, num_sums=8)
    expected = reference_sums(x, weight, lanes=lanes, num_sums=8)
    assert sums.dtype == torch.float32
    assert torch.allclose(sums, expected, rtol=1e-4, atol=1e-4)
    for num_sums in (1, 2, 4):
        found = lane_sums(x, packed, lanes=lanes, num_sums=num_sums)
        assert torch.equal(found, add_lanes(sums, num_sums))
    bias = torch.arange(NUM_COLUMNS).to(dtype)
    total = add_lanes(sums)[0].to(dtype)
    assert torch.equal(lane_linear(x, packed, lanes=lanes), total)
    assert torch.equal(lane_linear(x, packed, bias, lanes=lanes), total + bias)


def test_forms_have_the_same_bits(lanes: SumLanes) -> None:
    x, weight = operands(lanes, torch.bfloat16, 35)
    full = lane_linear(x, pack_lanes(weight, lanes, has_kernels=True), lanes=lanes)
    compressed = compress_weight(weight)
    assert compressed is not None
    assert torch.equal(lane_linear(x, compressed, lanes=lanes), full)


@pytest.mark.long  # on a CPU that prefers tiles, pairs are compiled for tests alone
def test_pairs_have_the_sums_of_the_reference(lanes: SumLanes) -> None:
    x, weight = operands(lanes, torch.bfloat16, 35)
    if lanes.alignment % 32 or not can_pack_pairs(weight) or packed_form(weight) is not None:
        pytest.skip("no products of pairs")
    pairs = lane_sums(x, pack_pairs(weight), lanes=lanes, num_sums=8)
    assert torch.allclose(
        pairs, reference_sums(x, weight, lanes=lanes, num_sums=8), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rank_computes_its_subtree_alone(
    lanes: SumLanes, dtype: torch.dtype, num_ranks: int
) -> None:
    x, weight = operands(lanes, dtype, 9)
    packed = pack_lanes(weight, lanes, has_kernels=True)
    expected = lane_sums(x, packed, lanes=lanes, num_sums=num_ranks)
    num_computed = 0
    for rank in range(num_ranks):
        first, end = rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks
        columns = slice(lanes.borders[first], lanes.borders[end])
        if columns.start == columns.stop:
            assert not expected[rank].any()
            continue
        part, own = lanes.part(first, end), weight[:, columns].contiguous()
        found = lane_sums(x[:, columns], pack_lanes(own, part, has_kernels=True), lanes=part)
        assert torch.equal(found[0], expected[rank])
        num_computed += 1
    assert num_computed > 1


@pytest.mark.each_value
def test_bits_depend_neither_on_other_rows_nor_on_threads(
    lanes: SumLanes, dtype: torch.dtype
) -> None:
    x, weight = operands(lanes, dtype, 70)
    packed = pack_lanes(weight, lanes, has_kernels=True)
    with computing_threads(1):
        full = lane_linear(x, packed, lanes=lanes)
    for num_rows in (1, 2, 3, 12, 31):
        with computing_threads(2):
            parts = [lane_linear(part, packed, lanes=lanes) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), full), f"{num_rows} rows"


def test_host_without_kernels_computes_in_lanes(dtype: torch.dtype) -> None:
    lanes = LANES["blocks"]
    x, weight = operands(lanes, dtype, 5)
    packed = pack_lanes(weight, lanes, has_kernels=False)
    assert isinstance(packed, LibraryLanes) == (dtype == torch.float32)
    found = lane_sums(x, packed, lanes=lanes, num_sums=8)
    expected = reference_sums(x, weight, lanes=lanes, num_sums=8)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_lanes_that_do_not_fit_raise() -> None:
    lanes = LANES["blocks"]
    x, weight = operands(lanes, torch.float32, 2)
    packed = pack_lanes(weight, lanes, has_kernels=True)
    with pytest.raises(BadTensor, match="end at column 288, not 256"):
        lane_linear(x[:, :256], packed, lanes=lanes)
    with pytest.raises(BadTensor, match="8 lanes do not give 3 sums"):
        lane_sums(x, packed, lanes=lanes, num_sums=3)
    with pytest.raises(ValueError, match="3 lanes do not form a tree"):
        SumLanes.of((0, 32, 64, 96))
