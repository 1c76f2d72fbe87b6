"""Products are near FP64, and a row's bits do not depend on the number of rows, on any CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu.gemm.avx512_bf16_gemm import PIECE_STEPS, pack_pairs
from kernels.cpu.gemm.linear import is_packed, linear, pack_weight
from kernels.cpu.simd.cpu_features import has_amx, has_avx512, has_pair_products
from kernels.ops import packed_form
from tests.support.kernels.tolerance import assert_near
from tests.support.threads import computing_threads

# (K, N): full tiles of AMX and others, a K that oneDNN splits, fewer columns than a block
SHAPES = [(48, 80), (64, 32), (60, 191), (96, 256), (768, 160), (1100, 64), (2048, 96)]
NUM_ROWS = 320


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with computing_threads(request.param):
        yield


def _operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    num_columns, num_outputs = shape
    x = torch.randn(NUM_ROWS, num_columns, generator=generator).to(dtype)
    return x, torch.randn(num_outputs, num_columns, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = _operands(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ weight.double().T
    tolerance = 4e-6 if dtype == torch.float32 else 2**-8
    bound = exact.abs() * tolerance + 1e-5 * shape[0] ** 0.5
    for prepared in (weight, pack_weight(weight)):
        y = linear(x, prepared)
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound).all()
        assert torch.equal(linear(x, prepared, bias), y + bias)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = _operands(shape, dtype)
    packed = pack_weight(weight)
    full = linear(x, packed)
    for num_rows in (1, 2, 5, 16, 17, 31, 33, 64, 129):
        parts = [linear(part, packed) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), full), f"{num_rows} rows"


def test_non_contiguous_rows() -> None:
    x, weight = _operands((64, 32), torch.bfloat16)
    wide = torch.cat([x, x.neg()], dim=1)
    packed = pack_weight(weight)
    assert torch.equal(linear(wide[:, :64], packed), linear(x, packed))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x, weight = _operands((64, 32), torch.bfloat16)
    packed = pack_weight(weight)
    expected = linear(x, packed)
    x[7, 3], x[8, 3] = float("nan"), float("inf")
    y = linear(x, packed)
    assert y[7].isnan().all()
    assert y[8].isinf().all()
    others = [row for row in range(NUM_ROWS) if row not in (7, 8)]
    assert torch.equal(y[others], expected[others])


@pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")
def test_full_tiles_are_packed_for_amx() -> None:
    packed = pack_weight(_operands((64, 96), torch.bfloat16)[1])
    assert is_packed(packed)
    assert packed_form(packed) is not None
    assert packed.shape == (3, 2, 16, 32, 2)
    assert pack_weight(packed) is packed


@pytest.mark.skipif(not has_pair_products(), reason="this CPU has no products of pairs")
def test_pairs_are_packed_side_by_side() -> None:
    weight = _operands((64, 96), torch.bfloat16)[1]
    packed = pack_pairs(weight)
    assert packed.shape == (3, 32, 32, 2)
    assert torch.equal(packed[1, 5], weight[32:64, 10:12])
    assert pack_weight(packed) is packed
    assert torch.equal(pack_weight(weight).flatten(), packed.flatten())  # the same bytes for AMX


@pytest.mark.skipif(not has_pair_products(), reason="this CPU has no products of pairs")
def test_products_of_pairs() -> None:
    """Also tested where AMX would be chosen; for rows in steps, see test_fused_layer.py."""
    for shape in ((64, 96), (32 * (PIECE_STEPS + 3), 32)):
        x, weight = _operands(shape, torch.bfloat16)
        packed = pack_pairs(weight)
        full = linear(x, packed)
        assert_near(full, x.double() @ weight.double().T)
        for num_rows in (1, 2, 3, 7, 12, 31):
            parts = [linear(part, packed) for part in x.split(num_rows)]
            assert torch.equal(torch.cat(parts), full), f"{num_rows} rows"


@pytest.mark.skipif(not has_avx512(), reason="this CPU has no AVX-512")
def test_full_fp32_blocks_are_packed_for_the_custom_gemm() -> None:
    weight = _operands((64, 96), torch.float32)[1]
    packed = pack_weight(weight)
    assert is_packed(packed)
    assert packed_form(packed) is not None
    assert packed.shape == (3, 64, 32)
    assert torch.equal(packed[1, 5], weight[32:64, 5])
    assert pack_weight(packed) is packed


@pytest.mark.parametrize("shape", [(64, 40), (40, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_shapes_have_no_custom_gemm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _operands(shape, dtype)[1]
    assert packed_form(weight) is None
    assert packed_form(pack_weight(weight)) is None
