"""Compressed weights decode losslessly, and every product equals that of the dense weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.cpu.codec.bf16_codec import BLOCK
from kernels.cpu.gemm import amx_gemm, compressed_weight, linear
from kernels.cpu.gemm.bf16_gemm import has_bf16_kernels
from kernels.cpu.gemm.compressed_linear import compressed_linear
from kernels.cpu.gemm.compressed_weight import CompressedWeight, compress_weight
from kernels.cpu.gemm.decompress_rows import decode_strips, select_rows
from kernels.cpu.gemm.linear import pack_weight
from tests.kernels.support.compiled_first import compile_calls_first, compile_first
from tests.support.threads import computing_threads

# (N, K): one block, full tiles, and partial blocks of rows, of columns, of both
SHAPES = [
    (32, 64),
    (160, 96),
    (64, 2048),
    (125, 128),
    (96, 250),
    (199, 120),
    (1000, 200),
    (1100, 1099),
]
NUM_ROWS = (1, 2, 16, 17, 31, 32, 33, 64, 75, 256, 270, 300)
ORDERS = ["tiles", "rows"]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_first("bfloat16", is_blocked=True, is_compressed=True)
    compile_calls_first(use_weight)


def use_weight() -> None:
    weight = compressed(like_a_model(32, 64))
    decompress(weight)
    select_rows(weight, torch.zeros(1).long())
    compressed_linear(torch.zeros(1, 64).bfloat16(), weight)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The order on a CPU with BF16 products, and on one without."""
    if request.param == "tiles" and not has_bf16_kernels():
        pytest.skip("this CPU has no products of BF16")
    if request.param == "rows":
        for module in (compressed_weight, linear):
            monkeypatch.setattr(module, "can_pack_bf16", lambda weight: False)
    return str(request.param)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with computing_threads(request.param):
        yield


def like_a_model(num_rows: int, width: int) -> Tensor:
    """Rows of normal weights, each with a different scale."""
    scale = torch.exp(torch.randn(num_rows, 1) * 0.5) * 0.02
    return (torch.randn(num_rows, width) * scale).bfloat16()


def compressed(weight: Tensor) -> CompressedWeight:
    found = compress_weight(weight)
    assert found is not None
    return found


def decompress(weight: CompressedWeight) -> Tensor:
    """[N, K]"""
    num_strips = len(weight.planes.bases)
    out = torch.empty(num_strips * BLOCK, weight.shape[1], dtype=torch.bfloat16)
    decode_strips(weight, 0, num_strips, out)
    return out[: weight.shape[0]]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_rows_are_restored(order: str, shape: tuple[int, int]) -> None:
    weight = like_a_model(*shape)
    found = compressed(weight)
    assert found.order == ("rows" if any(size % 32 for size in shape) else order)
    assert found.num_bytes < 2 * weight.numel() == 2 * found.numel()
    assert_same_bits(decompress(found), weight)
    row_ids = torch.tensor([shape[0] - 1, 0, 7, 7, 31])
    assert_same_bits(select_rows(found, row_ids), weight[row_ids])


@pytest.mark.usefixtures("order")
def test_every_bit_pattern_is_restored() -> None:
    patterns = torch.arange(1 << 16).int().to(torch.int16)[torch.randperm(1 << 16)]
    weight = torch.cat([patterns.view(torch.bfloat16), like_a_model(1, 1 << 18)[0]])
    weight = weight[torch.randperm(len(weight))].view(640, 512)
    found = compressed(weight)
    assert found.num_verbatim > 1 << 15
    assert_same_bits(decompress(found), weight)
    assert_same_bits(select_rows(found, torch.arange(640)), weight)


@pytest.mark.usefixtures("order")
def test_blocks_without_a_coded_word_are_restored() -> None:
    weight = like_a_model(64, 1024)
    weight[32:, 96:160] = torch.tensor([0.0, float("nan")]).repeat(32)
    found = compressed(weight)
    assert found.num_verbatim >= 32 * 64
    assert_same_bits(decompress(found), weight)


@pytest.mark.usefixtures("order", "num_threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_dense_weights(shape: tuple[int, int]) -> None:
    weight, bias = like_a_model(*shape), torch.randn(shape[0]).bfloat16()
    found, packed = compressed(weight), pack_weight(weight)
    x = torch.randn(max(NUM_ROWS), shape[1]).bfloat16()
    for num_rows in NUM_ROWS:
        rows = x[:num_rows]
        assert_same_bits(compressed_linear(rows, found), linear.linear(rows, packed))
        assert_same_bits(compressed_linear(rows, found, bias), linear.linear(rows, packed, bias))


@pytest.mark.usefixtures("order")
def test_nan_and_infinity_are_multiplied_as_with_dense_weights() -> None:
    weight = like_a_model(96, 256)
    weight[5, 7], weight[40, 200], weight[90] = float("inf"), float("nan"), 0.0
    x = torch.randn(40, 256).bfloat16()
    found, expected = (
        compressed_linear(x, compressed(weight)),
        linear.linear(x, pack_weight(weight)),
    )
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[:, 40].isnan().all()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.usefixtures("order")
def test_slices_of_a_weight_are_restored() -> None:
    """Shards of ranks that split a layer by its output, or by its input."""
    full = like_a_model(256, 512)
    for part in (full[64:160], full[:, 128:384], full[32:224, 96:352], full.T):
        assert_same_bits(decompress(compressed(part)), part)


def test_non_contiguous_rows() -> None:
    weight, wide = like_a_model(64, 96), torch.randn(40, 200).bfloat16()
    found = compressed(weight)
    x = wide[:, 50:146]
    assert_same_bits(compressed_linear(x, found), compressed_linear(x.contiguous(), found))


@pytest.mark.usefixtures("order")
def test_memory_contains_the_entire_weight() -> None:
    weight = like_a_model(96, 320)
    found = compressed(weight)
    copied = replace(found, memory=found.memory.clone())
    found.memory.fill_(255)
    assert_same_bits(decompress(copied), weight)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("degrees", "bits"), [(0, 11.45), (6, 11.5), (4, 11.6)])
def test_size_of_realistic_weights(degrees: int, bits: float) -> None:
    """Rows whose scales spread by e^0.5, normal or Student-t: 12.15 bits is the limit."""
    weight = like_a_model(512, 2048).float()
    if degrees:
        weight *= (degrees / torch.distributions.Chi2(degrees).sample(weight.shape)).sqrt()
    assert 11 < 8 * compressed(weight.bfloat16()).num_bytes / weight.numel() < bits


@pytest.mark.usefixtures("order")
def test_incompressible_weight_returns_none() -> None:
    noise = torch.randint(-(1 << 15), 1 << 15, (64, 256)).to(torch.int16).view(torch.bfloat16)
    assert compress_weight(noise) is None
    assert compress_weight(like_a_model(1, 512)) is None  # 31 of a block's 32 rows are empty
    assert compress_weight(like_a_model(64, 64).float()) is None
    assert compress_weight(like_a_model(64, 64).half()) is None
    assert compress_weight(torch.empty(0, 64, dtype=torch.bfloat16)) is None


def test_invalid_arguments_raise() -> None:
    found = compressed(like_a_model(64, 96))
    with pytest.raises(BadTensor, match=r"x has shape \[2, 64\], not \[any, 96\]"):
        compressed_linear(torch.zeros(2, 64, dtype=torch.bfloat16), found)
    with pytest.raises(BadTensor, match=r"x is torch\.float32"):
        compressed_linear(torch.zeros(2, 96), found)
    for row_id in (-1, 64):
        with pytest.raises(IndexError, match=r"row ids must be in \[0, 64\)"):
            select_rows(found, torch.tensor([3, row_id]))


@pytest.mark.skipif(not has_bf16_kernels(), reason="this CPU has no products of BF16")
def test_prefetch_past_the_end_is_harmless() -> None:
    """The blocks after the last one are outside the weight's memory."""
    weight = like_a_model(32, 32 * amx_gemm.PIECE_STEPS)
    found = compressed(weight)
    x = torch.eye(32 * amx_gemm.PIECE_STEPS).bfloat16()
    assert_same_bits(compressed_linear(x, found), weight.T.contiguous())
