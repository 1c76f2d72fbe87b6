"""A layer's kernel has the bits of the single operations: for few and many rows, any threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

from kernels.cpu.gemm.bf16_gemm import has_bf16_kernels
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.layer.fused_layer import MANY_ROWS, PackedLayer, packed_layer
from kernels.cpu.simd.cpu_features import has_avx512
from kernels.ops import (
    add_rms_norm,
    compress_weight,
    cpu_compressed_linear,
    gelu_and_mul,
    lane_linear,
    linear,
    pack_weight,
    rms_norm,
    rotate_and_store,
    silu_and_mul,
)
from kernels.sum_lanes import SumLanes
from tests.kernels.support.compiled_first import compile_first
from tests.support.threads import computing_threads

BF16 = pytest.mark.skipif(not has_bf16_kernels(), reason="needs products of BF16")
AVX512 = pytest.mark.skipif(not has_avx512(), reason="needs a CPU with AVX-512")
EPS = 1e-5
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 3, 1, 16
GATES = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}
rng = torch.Generator()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_first("float32", is_blocked=True)
    compile_first("bfloat16", is_blocked=True, is_compressed=True)


def _lanes(width: int) -> SumLanes:
    """Eight lanes of whole blocks of 32, some of them empty."""
    return SumLanes.of([width // 32 * lane // 8 * 32 for lane in range(9)])


@dataclass
class Layer:
    """A layer of single operations, with the arguments of `packed_layer`."""

    hidden: int = 96
    inner: int = 160
    head_dim: int = 64
    rotary_dim: int = 64
    has_bias: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    has_unit_offset: bool = False
    activation: str = "silu"
    is_compressed: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        rng.manual_seed(0)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * self.head_dim
        shapes = [
            (width, self.hidden),
            (self.hidden, NUM_HEADS * self.head_dim),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]
        form = compress_weight if self.is_compressed else pack_weight
        self.weights = [form(self.random(*shape, scale=0.2)) for shape in shapes]
        self.lanes = {1: _lanes(NUM_HEADS * self.head_dim), 3: _lanes(self.inner)}
        self.norms = self.random(self.hidden), self.random(self.hidden)
        self.bias = self.random(width) if self.has_bias else None
        self.post_norms = [self.random(self.hidden) for _ in range(2 * self.has_post_norms)]
        self.head_norms = [self.random(self.head_dim) for _ in range(2 * self.has_head_norms)]

    def product(self, x: Tensor, index: int, bias: Tensor | None = None) -> Tensor:
        lanes = self.lanes.get(index)
        if lanes is not None:
            return lane_linear(x, self.weights[index], bias, lanes=lanes)
        multiply: Any = cpu_compressed_linear if self.is_compressed else linear
        return multiply(x, self.weights[index], bias)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(self.dtype)

    def fused(self) -> PackedLayer | None:
        return packed_layer(
            self.norms,
            self.weights,
            (self.lanes[1], self.lanes[3]),
            qkv_bias=self.bias,
            head_norms=self.head_norms,
            post_norms=self.post_norms,
            eps=EPS,
            has_unit_offset=self.has_unit_offset,
            activation=self.activation,
        )

    def pre_attention(self, x: Tensor, *cached: Tensor) -> Tensor:
        normed = rms_norm(x, self.norms[0], EPS, has_unit_offset=self.has_unit_offset)
        heads = self.product(normed, 0, self.bias).view(len(x), -1, self.head_dim)
        norms = dict(zip(("query_norm", "key_norm"), self.head_norms, strict=False))
        options: dict[str, Any] = {"eps": EPS, "has_unit_offset": self.has_unit_offset}
        return rotate_and_store(heads, *cached, **norms, **options)

    def post_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        options: dict[str, Any] = {"eps": EPS, "has_unit_offset": self.has_unit_offset}
        update = self.product(attended.flatten(1), 1)
        if self.has_post_norms:
            update = rms_norm(update, self.post_norms[0], **options)
        normed, x = add_rms_norm(update, x, self.norms[1], **options)
        update = self.product(GATES[self.activation](self.product(normed, 2)), 3)
        if self.has_post_norms:
            update = rms_norm(update, self.post_norms[1], **options)
        return x + update


LAYERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"has_bias": True},
    "qwen3": {"has_head_norms": True, "head_dim": 128, "rotary_dim": 128},
    "gemma": {
        "has_head_norms": True,
        "has_post_norms": True,
        "has_unit_offset": True,
        "activation": "gelu_pytorch_tanh",
    },
    "part of a head": {"head_dim": 96, "rotary_dim": 64, "hidden": 64, "inner": 32},
    "heads of no whole block": {"head_dim": 32, "rotary_dim": 24, "has_head_norms": True},
    "wide heads": {"head_dim": 96, "rotary_dim": 96, "has_head_norms": True, "hidden": 288},
}
COMPRESSED = {"hidden": 256, "inner": 512, "is_compressed": True}
DTYPES = {torch.bfloat16: BF16, torch.float32: AVX512}
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=mark) for dtype, mark in DTYPES.items()], ids=str
)


@cache
def layer_of(dtype: torch.dtype, **changes: Any) -> Layer:
    return Layer(dtype=dtype, **changes)


def check(layer: Layer, num_rows: int) -> None:
    fused = layer.fused()
    assert fused is not None
    x = layer.random(num_rows, layer.hidden)
    angles = torch.randn(2, num_rows, layer.rotary_dim // 2, generator=rng)
    slots = torch.randperm(num_rows + 7, generator=rng)[:num_rows]
    slots[num_rows // 2] = -1
    num_blocks = -(-(num_rows + 7) // BLOCK_SIZE)
    shape = 2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, layer.head_dim
    kv_cache = torch.zeros(shape, dtype=layer.dtype)
    expected_cache = kv_cache.clone()
    attended = layer.random(num_rows, NUM_HEADS, layer.head_dim)
    expected_query = layer.pre_attention(x, *angles, expected_cache, slots)
    expected = layer.post_attention(x, attended)

    for is_by_rows in (False, True) if num_rows >= MANY_ROWS else (False,):
        kv_cache.zero_()
        query = fused.pre_attention(x, *angles, kv_cache, slots, is_by_rows=is_by_rows)
        assert torch.equal(query, expected_query)
        assert torch.equal(kv_cache, expected_cache)
        assert torch.equal(fused.post_attention(x, attended, is_by_rows=is_by_rows), expected)


NUM_ROWS = (1, 2, 16, 17, 33, 70, 2 * MANY_ROWS + 5)
# Many rows have loops of their own, which take 13 s to compile in FP32 too.
SHORT = {
    *((torch.bfloat16, *case) for case in zip(LAYERS, NUM_ROWS, strict=True)),
    *((torch.float32, *case) for case in zip(LAYERS, (*NUM_ROWS[:-1], 70), strict=True)),
}


def often(case: Any, is_short: bool) -> Any:
    """The parameters of a case, which is left to long runs unless it is short."""
    marks = [DTYPES[case[0]], *([] if is_short else [pytest.mark.long])]
    return pytest.param(*case, marks=marks)


@pytest.mark.parametrize(
    ("dtype", "name", "num_rows"),
    [often(case, case in SHORT) for case in product(DTYPES, LAYERS, NUM_ROWS)],
    ids=str,
)
def test_bits_equal_those_of_single_operations(
    name: str, num_rows: int, dtype: torch.dtype
) -> None:
    check(layer_of(dtype, **LAYERS[name]), num_rows)


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [
        often(case, case[0] is torch.bfloat16 or case[1] < MANY_ROWS)
        for case in product(DTYPES, (40, MANY_ROWS, 600))
    ],
    ids=str,
)
def test_bits_on_one_thread(num_rows: int, dtype: torch.dtype) -> None:
    with computing_threads(1):
        assert numba.get_num_threads() == 1
        check(layer_of(dtype, **LAYERS["qwen3"]), num_rows)


@BF16
@pytest.mark.parametrize(
    "num_rows", [1, 33, pytest.param(2 * MANY_ROWS + 5, marks=pytest.mark.long)]
)
def test_compressed_weights_are_used_directly(num_rows: int) -> None:
    layer = layer_of(torch.bfloat16, **COMPRESSED)
    assert all(isinstance(each, CompressedWeight) for each in layer.weights)
    check(layer, num_rows)


@each_dtype
def test_no_fused_layer_without_packed_weights(dtype: torch.dtype) -> None:
    layer = Layer(dtype=dtype)
    layer.weights[2] = layer.random(2 * layer.inner, layer.hidden)
    assert layer.fused() is None
