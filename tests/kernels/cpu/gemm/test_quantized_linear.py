"""Products with quantized weights have the bits of products with the dequantized ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.gemm import packed_linear
from kernels.cpu.gemm.avx512_bf16_gemm import can_pack_pairs
from kernels.cpu.gemm.lane_linear import lane_linear, lane_sums, pack_lanes
from kernels.cpu.gemm.linear import linear, pack_weight
from kernels.cpu.gemm.quantized.planes import E4m3Planes, Fp8Planes, Int4Planes, Int8Planes
from kernels.cpu.gemm.quantized_linear import (
    quantized_lane_linear,
    quantized_lane_sums,
    quantized_linear,
)
from kernels.quantized_weight import QuantizedWeight
from kernels.sum_lanes import SumLanes
from tests.kernels.support.compiled_first import compile_fp8_first, compile_int4_first
from tests.kernels.support.quantized import (
    ODD_SCALES,
    assert_same_bits,
    random_bytes,
    random_fp8,
    random_int4,
    random_mxfp4,
)
from tests.support.grids import in_short_run
from tests.support.threads import computing_threads

# (N, K): decoded beside the product; partial blocks; fewer rows than a block
SHAPES = [(64, 128), (160, 640), (96, 384), (33, 96), (7, 64), (200, 320), (300, 1152)]
NUM_ROWS = (1, 2, 9, 33, 70, 300)
BF16 = torch.bfloat16
DTYPES = (BF16, torch.float32)
# In FP32 all weights are decoded first: full and partial blocks are alike.
SHORT = {*product(SHAPES, [BF16]), ((64, 128), torch.float32), ((33, 96), torch.float32)}
HAS_PAIRS = can_pack_pairs(torch.empty(32, 32, dtype=BF16))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_fp8_first()
    compile_int4_first()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with computing_threads(request.param):
        yield


Weights = tuple[QuantizedWeight, Tensor]
WEIGHTS: dict[str, Callable[[tuple[int, int], torch.dtype], Weights]] = {
    "int4": lambda shape, dtype: random_int4(*shape, 32, has_zeros=False, dtype=dtype),
    "int4, zeros": lambda shape, dtype: random_int4(*shape, 32, has_zeros=True, dtype=dtype),
    "int4, floats": lambda shape, dtype: random_int4(
        *shape, shape[1], has_zeros=False, scale_dtype=torch.float32, dtype=dtype
    ),
    "int4, halves": lambda shape, dtype: random_int4(
        *shape, 32, has_zeros=True, scale_dtype=torch.float16, dtype=dtype
    ),
    "int8, zeros, halves": lambda shape, dtype: random_bytes(
        *shape, 32, "int8", has_zeros=True, scale_dtype=torch.float16, dtype=dtype
    ),
    "int8": lambda shape, dtype: random_bytes(*shape, shape[1], "int8", dtype=dtype),
    "e4m3": lambda shape, dtype: random_bytes(*shape, shape[1], "e4m3", dtype=dtype),
    "fp8": lambda shape, dtype: random_fp8(*shape, dtype=dtype),
    "mxfp4": lambda shape, dtype: random_mxfp4(*shape, dtype=dtype),
}
FORMS = {
    "int4": Int4Planes,
    "int8": Int8Planes,
    "e4m3": E4m3Planes,
    "fp8": Fp8Planes,
    "mxfp4": Int4Planes,
}


def kinds(*short: str) -> pytest.MarkDecorator:
    """A parameter of all kinds; those that are not short only compile, 4 s each, in long runs."""
    return pytest.mark.parametrize("kind", in_short_run(short, WEIGHTS))


def weight_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Weights:
    torch.manual_seed(shape[0])
    return WEIGHTS[kind](shape, dtype)


@pytest.mark.usefixtures("num_threads")
@kinds("int4, zeros", "int8, zeros, halves", "e4m3", "fp8")
@pytest.mark.parametrize(("shape", "dtype"), in_short_run(SHORT, product(SHAPES, DTYPES)), ids=str)
def test_products_have_the_bits_of_dense_weights(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, dense = weight_of(kind, shape, dtype)
    x, bias = torch.randn(max(NUM_ROWS), shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    packed = pack_weight(dense)
    for num_rows in NUM_ROWS:
        rows = x[:num_rows]
        found = quantized_linear(rows, weight, bias, has_kernels=True)
        assert_same_bits(found, linear(rows, packed, bias))


@pytest.mark.long
@kinds("int4")
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "lanes",
    [SumLanes.of((0, 32, 96, 96, 128, 160, 256, 320, 384)), SumLanes.of((0, 24, 384))],
    ids=["blocks", "partial blocks"],
)
def test_sums_of_lanes_have_the_bits_of_dense_weights(
    kind: str, lanes: SumLanes, dtype: torch.dtype
) -> None:
    weight, dense = weight_of(kind, (96, 384), dtype)
    x, bias = torch.randn(70, 384).to(dtype), torch.randn(96).to(dtype)
    packed = pack_lanes(dense, lanes, has_kernels=True)
    mode = {"lanes": lanes, "has_kernels": True}
    found = quantized_lane_linear(x, weight, bias, **mode)
    assert_same_bits(found, lane_linear(x, packed, bias, lanes=lanes))
    for num_sums in (1, 2):
        found = quantized_lane_sums(x, weight, num_sums=num_sums, **mode)
        assert_same_bits(found, lane_sums(x, packed, lanes=lanes, num_sums=num_sums))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("int4", {"has_zeros": True, "scales": ODD_SCALES}),
        pytest.param(
            "int4",
            {"has_zeros": False, "scales": (0.0, -0.0, -1.0, 2.0**-99)},
            marks=pytest.mark.long,
        ),
        ("e4m3", {"scales": (0.0, -0.0, -1.0, 2.0**-99)}),
        ("fp8", {"scales": (1e-40, 0.5)}),
        ("fp8", {"has_nan": True}),
    ],
    ids=str,
)
def test_subnormal_and_huge_scales_are_multiplied_as_with_dense_weights(
    kind: str, options: dict[str, Any]
) -> None:
    x = torch.randn(40, 256).to(BF16)
    makers: dict[str, Callable[..., Weights]] = {
        "int4": partial(random_int4, 64, 256, 32),
        "e4m3": partial(random_bytes, 64, 256, 256, "e4m3"),
        "fp8": partial(random_fp8, 64, 256),
    }
    weight, dense = makers[kind](**options)
    found = quantized_linear(x, weight, has_kernels=True)
    assert_same_bits(found, linear(x, pack_weight(dense)))


@pytest.mark.skipif(not HAS_PAIRS, reason="this CPU has no products of BF16")
def test_whole_blocks_are_decoded_beside_the_product() -> None:
    for kind in WEIGHTS:
        form = FORMS[kind.partition(",")[0]]
        assert type(packed_linear.for_gemm(weight_of(kind, (64, 128), BF16)[0])) is form
        for shape, dtype in (((33, 96), BF16), ((64, 128), torch.float32)):
            assert packed_linear.for_gemm(weight_of(kind, shape, dtype)[0]) is None
    tiny = random_int4(64, 128, 32, has_zeros=False, scales=(2.0**-110,))[0]
    assert packed_linear.for_gemm(tiny) is None


def test_without_compiled_loops_the_library_multiplies() -> None:
    x = torch.randn(5, 128).to(BF16)
    for kind in WEIGHTS:
        weight, dense = weight_of(kind, (64, 128), BF16)
        found = quantized_linear(x, weight, has_kernels=False).float()
        expected = x.float() @ dense.float().T
        assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
