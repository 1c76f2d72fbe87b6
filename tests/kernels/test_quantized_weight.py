"""Transcoding loses nothing: decoded tiles have the bits of the dequantized checkpoint."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.reference.dequantize import dequantize_fp8, dequantize_int4, dequantize_mxfp4
from kernels.transcode import Fp8Part, Int4Part, fp8_weight, int4_weight
from tests.kernels.support.quantized import (
    ODD_SCALES,
    assert_same_bits,
    random_fp8,
    random_int4,
    random_mxfp4,
    random_words,
)


@pytest.mark.parametrize("seed", range(60))
def test_int4_decodes_to_the_dequantized_weight(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    group = rng.choice([8, 32, 64, 128])
    width = group * rng.randint(1, 5)
    weight, expected = random_int4(
        rng.randint(1, 330),
        width,
        rng.choice([group, width]),
        has_zeros=rng.random() < 0.5,
        scale_dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        scales=rng.choice([(), ODD_SCALES]),
    )
    assert_same_bits(weight.dense(), expected)
    assert weight.numel() == expected.numel()


@pytest.mark.parametrize("seed", range(40))
def test_fp8_decodes_to_the_dequantized_weight(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weight, expected = random_fp8(
        rng.randint(1, 400),
        rng.randint(1, 400),
        dtype=rng.choice([torch.bfloat16, torch.float32]),
        scales=rng.choice([(), ODD_SCALES]),
        has_nan=rng.random() < 0.5,
    )
    assert_same_bits(weight.dense(), expected)


@pytest.mark.parametrize("seed", range(40))
def test_mxfp4_decodes_to_the_dequantized_weight(seed: int) -> None:
    """Exponents of subnormal numbers, of the largest, and NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weight, expected = random_mxfp4(
        rng.randint(1, 330),
        32 * rng.randint(1, 9),
        dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        exponents=rng.choice([(), (0, 1, 2, 252, 253, 254, 255)]),
    )
    assert_same_bits(weight.dense(), expected)


def test_codes_of_mxfp4() -> None:
    blocks = torch.tensor([0x10 * (2 * n + 1) + 2 * n for n in range(8)] * 2).to(torch.uint8)
    dense = dequantize_mxfp4(blocks.view(1, 1, 16), torch.tensor([[128]]).byte(), torch.float32)
    numbers = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert dense.tolist() == [[*numbers, *(-each for each in numbers)] * 2]


@pytest.mark.parametrize("rows", [(64, 32, 32), (64, 20, 44), (7, 9)], ids=str)
def test_parts_are_one_weight(rows: tuple[int, ...]) -> None:
    int4 = [
        Int4Part(random_words(n, 8), torch.randn(n, 2).bfloat16(), random_words(-(-n // 8), 2))
        for n in rows
    ]
    found = int4_weight(int4, 64, 32, torch.bfloat16).dense()
    dense = [dequantize_int4(*part, 64, torch.bfloat16) for part in int4]
    assert_same_bits(found, torch.cat(dense))
    fp8 = [Fp8Part(torch.randn(n, 200).to(torch.float8_e4m3fn), torch.randn(1, 2)) for n in rows]
    dense = [dequantize_fp8(*part, torch.bfloat16) for part in fp8]
    assert_same_bits(fp8_weight(fp8, torch.bfloat16).dense(), torch.cat(dense))


def test_a_weight_takes_the_bytes_of_the_file() -> None:
    """Symmetric codes and BF16 scales: 4.5 bits; zeros take a byte instead of half of one."""
    for has_zeros, bits in ((False, 4.5), (True, 4.75)):
        weight, _ = random_int4(256, 512, 32, has_zeros=has_zeros)
        assert weight.num_bytes == 256 * 512 * bits / 8
    assert random_fp8(256, 512)[0].num_bytes == 256 * 512 + 4 * 8 * 4


def test_codes_are_low_nibble_first() -> None:
    packed = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    dense = dequantize_int4(packed, torch.ones(1, 1), None, 16, torch.float32)
    assert dense.tolist() == [[float(code - 8) for code in range(16)]]
