"""The largest column of a product that is never written down."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.amx import has_amx
from kernels.cpu.amx_products import CHUNK_ROWS
from kernels.cpu.compressed_weight import CompressedWeight
from kernels.ops import argmax_logits, compress_weight, logits, pack_weight
from tests.threads import computing_threads

pytestmark = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")
draw = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 31, 33, CHUNK_ROWS + 1])
def test_the_largest_logit(num_rows: int, num_threads: int) -> None:
    x, weight = random(num_rows, 64), pack_weight(random(2048, 64))
    with computing_threads(num_threads):
        got = argmax_logits(x, weight)
    assert torch.equal(got, logits(x, weight).argmax(-1))


def test_of_a_compressed_weight() -> None:
    x, weight = random(40, 256), random(512, 256)
    compressed = compress_weight(weight)
    assert isinstance(compressed, CompressedWeight)
    assert torch.equal(argmax_logits(x, compressed), argmax_logits(x, pack_weight(weight)))
    assert torch.equal(logits(x, compressed), logits(x, pack_weight(weight)))


def test_of_equal_ones_the_first() -> None:
    weight = random(32, 64).repeat(9, 1)  # each logit nine times, in every task's part
    x = random(5, 64)
    assert torch.equal(
        argmax_logits(x, pack_weight(weight)), argmax_logits(x, pack_weight(weight[:32].clone()))
    )
    assert argmax_logits(x, pack_weight(torch.zeros(288, 64).bfloat16())).tolist() == [0] * 5


def test_rows_of_no_numbers_get_the_first_column() -> None:
    x = torch.full((2, 64), torch.nan).bfloat16()
    assert argmax_logits(x, pack_weight(random(96, 64))).tolist() == [0, 0]
