"""The argmax of logits that are never stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu.gemm.bf16_gemm import has_bf16_kernels
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.gemm_common import HALF_CHUNK_ROWS
from kernels.cpu.simd.cpu_features import has_avx512
from kernels.ops import compress_weight, pack_weight, packed_argmax, packed_form, packed_logits
from tests.kernels.support.compiled_first import compile_first
from tests.support.threads import computing_threads

BF16 = pytest.mark.skipif(not has_bf16_kernels(), reason="needs products of BF16")
AVX512 = pytest.mark.skipif(not has_avx512(), reason="needs a CPU with AVX-512")
each_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=BF16), pytest.param(torch.float32, marks=AVX512)],
    ids=str,
)
rng = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_first("float32", is_blocked=True)
    compile_first("bfloat16", is_blocked=True, is_compressed=True)


def argmax_logits(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return packed_argmax(x, packed_form(weight))


def logits(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return packed_logits(x, packed_form(weight))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 31, 33, HALF_CHUNK_ROWS + 1])
def test_argmax_equals_that_of_stored_logits(
    num_rows: int, num_threads: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, 64, dtype=dtype), pack_weight(random(2048, 64, dtype=dtype))
    with computing_threads(num_threads):
        actual = argmax_logits(x, weight)
    assert torch.equal(actual, logits(x, weight).argmax(-1))


@BF16
def test_compressed_weight_gives_the_same_argmax() -> None:
    x, weight = random(40, 256), random(512, 256)
    compressed = compress_weight(weight)
    assert isinstance(compressed, CompressedWeight)
    assert torch.equal(argmax_logits(x, compressed), argmax_logits(x, pack_weight(weight)))
    assert torch.equal(logits(x, compressed), logits(x, pack_weight(weight)))


@each_dtype
def test_first_of_equal_logits_wins(dtype: torch.dtype) -> None:
    weight = random(32, 64, dtype=dtype).repeat(9, 1)  # each logit nine times, in every task's part
    x = random(5, 64, dtype=dtype)
    assert torch.equal(
        argmax_logits(x, pack_weight(weight)), argmax_logits(x, pack_weight(weight[:32].clone()))
    )
    assert argmax_logits(x, pack_weight(torch.zeros(288, 64, dtype=dtype))).tolist() == [0] * 5


@each_dtype
def test_nan_rows_get_the_first_column(dtype: torch.dtype) -> None:
    x = torch.full((2, 64), torch.nan, dtype=dtype)
    assert argmax_logits(x, pack_weight(random(96, 64, dtype=dtype))).tolist() == [0, 0]
