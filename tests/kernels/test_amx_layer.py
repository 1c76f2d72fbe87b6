"""A layer's kernel has the bits of the single operations: of few rows and many, on any threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

from kernels.cpu.amx import has_amx
from kernels.cpu.amx_layer import MANY_ROWS, AmxLayer, amx_layer
from kernels.cpu.compressed_weight import CompressedWeight
from kernels.ops import (
    add_rms_norm,
    compress_weight,
    gelu_and_mul,
    linear,
    pack_weight,
    rms_norm,
    rotate_and_store,
    silu_and_mul,
)
from tests.threads import computing_threads

pytestmark = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")
EPS = 1e-5
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 3, 1, 16
GATES = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}
draw = torch.Generator()


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=draw) * scale).bfloat16()


@dataclass
class Layer:
    """By single operations; and all that `amx_layer` takes."""

    hidden: int = 96
    inner: int = 160
    head_dim: int = 64
    rotary_dim: int = 64
    has_bias: bool = False
    has_head_norms: bool = False
    has_unit_offset: bool = False
    activation: str = "silu"
    is_compressed: bool = False

    def __post_init__(self) -> None:
        draw.manual_seed(0)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * self.head_dim
        shapes = [
            (width, self.hidden),
            (self.hidden, NUM_HEADS * self.head_dim),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]
        form = compress_weight if self.is_compressed else pack_weight
        self.weights = [form(random(*shape, scale=0.2)) for shape in shapes]
        self.norms = random(self.hidden), random(self.hidden)
        self.bias = random(width) if self.has_bias else None
        self.head_norms = [random(self.head_dim) for _ in range(2 * self.has_head_norms)]

    def fused(self) -> AmxLayer | None:
        return amx_layer(
            self.norms,
            self.weights,
            qkv_bias=self.bias,
            head_norms=self.head_norms,
            eps=EPS,
            has_unit_offset=self.has_unit_offset,
            activation=self.activation,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
        )

    def before(self, x: Tensor, *cached: Tensor) -> Tensor:
        normed = rms_norm(x, self.norms[0], EPS, has_unit_offset=self.has_unit_offset)
        heads = linear(normed, self.weights[0], self.bias).view(len(x), -1, self.head_dim)
        norms = dict(zip(("query_norm", "key_norm"), self.head_norms, strict=False))
        options: dict[str, Any] = {"eps": EPS, "has_unit_offset": self.has_unit_offset}
        return rotate_and_store(heads, *cached, **norms, **options)

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        normed, x = add_rms_norm(
            linear(attended.flatten(1), self.weights[1]),
            x,
            self.norms[1],
            EPS,
            has_unit_offset=self.has_unit_offset,
        )
        return x + linear(GATES[self.activation](linear(normed, self.weights[2])), self.weights[3])


LAYERS = {
    "llama": Layer(),
    "qwen2": Layer(has_bias=True),
    "qwen3": Layer(has_head_norms=True, head_dim=128, rotary_dim=128),
    "gelu": Layer(has_head_norms=True, has_unit_offset=True, activation="gelu_pytorch_tanh"),
    "compressed": Layer(hidden=256, inner=512, is_compressed=True),
    "part of a head": Layer(head_dim=96, rotary_dim=64, hidden=64, inner=32),
}


def check(layer: Layer, num_rows: int) -> None:
    fused = layer.fused()
    assert fused is not None
    x = random(num_rows, layer.hidden)
    angles = torch.randn(2, num_rows, layer.rotary_dim // 2, generator=draw)
    slots = torch.randperm(num_rows + 7, generator=draw)[:num_rows]
    slots[num_rows // 2] = -1
    num_blocks = -(-(num_rows + 7) // BLOCK_SIZE)
    cache = torch.zeros(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, layer.head_dim).bfloat16()
    expected_cache = cache.clone()
    attended = random(num_rows, NUM_HEADS, layer.head_dim)

    query = fused.before(x, *angles, cache, slots)
    assert torch.equal(query, layer.before(x, *angles, expected_cache, slots))
    assert torch.equal(cache, expected_cache)
    assert torch.equal(fused.behind(x, attended), layer.behind(x, attended))


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 70, 2 * MANY_ROWS + 5])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_single_operations(name: str, num_rows: int) -> None:
    check(LAYERS[name], num_rows)


@pytest.mark.parametrize("num_rows", [40, MANY_ROWS, 600])
def test_on_one_thread(num_rows: int) -> None:
    with computing_threads(1):
        assert numba.get_num_threads() == 1
        check(LAYERS["qwen3"], num_rows)


def test_compressed_weights_are_multiplied_by_as_they_are() -> None:
    assert all(isinstance(each, CompressedWeight) for each in LAYERS["compressed"].weights)


def test_none_without_packed_weights() -> None:
    layer = Layer()
    layer.weights[2] = random(2 * layer.inner, layer.hidden)
    assert layer.fused() is None


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(48, 48), (96, 96)])
def test_none_of_other_heads(head_dim: int, rotary_dim: int) -> None:
    layer = Layer()
    layer.head_dim, layer.rotary_dim = head_dim, rotary_dim
    assert layer.fused() is None
