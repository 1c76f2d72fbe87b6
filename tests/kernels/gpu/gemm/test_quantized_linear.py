"""Products with quantized weights on a device: the bits of the dequantized weight's products."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import ops
from kernels.sum_lanes import SumLanes
from tests.kernels.support.quantized import assert_same_bits, random_fp8, random_int4

LANES = SumLanes.of((0, 32, 96, 96, 128, 160, 192, 224, 256))


def test_products_have_the_bits_of_dense_weights(device: torch.device) -> None:
    dtype = torch.float32
    x = torch.randn(9, 256, device=device)
    int4 = random_int4(70, 256, 32, has_zeros=True, dtype=dtype)
    for weight, on_cpu in (int4, random_fp8(70, 256, dtype=dtype)):
        weight, dense = replace(weight, memory=weight.memory.to(device)), on_cpu.to(device)
        assert ops.packed_form(weight) is None
        found = ops.quantized_linear(x, weight, is_batch_invariant=True)
        assert_same_bits(found, ops.linear(x, dense, is_batch_invariant=True))
        found = ops.quantized_lane_linear(x, weight, lanes=LANES)
        assert_same_bits(found, ops.lane_linear(x, dense, lanes=LANES))
        sums = ops.quantized_lane_sums(x, weight, lanes=LANES, num_sums=2)
        assert_same_bits(sums, ops.lane_sums(x, dense, lanes=LANES, num_sums=2))
