"""Quantized weights as `sum_steps` takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.quantized_weight import BLOCK, FP8_BLOCK

FP8_STEPS = FP8_BLOCK // BLOCK


class Int4Planes(NamedTuple):
    codes: Any  # [N / 32, K / 32, 512]
    scales: Any  # [N / 32, groups, 32] FP32, the bits of BF16 or FP16, or exponents
    zeros: Any  # [N / 32, groups, 32] uint8, or None: 8
    group_steps: Any  # int64: of 32 columns


class Int8Planes(NamedTuple):
    codes: Any  # [N / 32, K / 32, 1024]
    scales: Any  # as of Int4Planes
    zeros: Any  # [N / 32, groups, 32] uint8, or None: 128
    group_steps: Any


class E4m3Planes(NamedTuple):
    codes: Any  # [N / 32, K / 32, 1024]
    scales: Any  # as of Int4Planes
    zeros: Any  # None
    group_steps: Any


class Fp8Planes(NamedTuple):
    codes: Any  # [N / 32, K / 32, 1024]
    scales: Any  # [N / 32, 1, ⌈K / 128⌉] FP32


Planes = Int4Planes | Int8Planes | E4m3Planes | Fp8Planes
