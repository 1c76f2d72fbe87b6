"""Chooses the instructions for BF16 GEMMs on this machine: AMX, else AVX-512 BF16 pairs."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.gemm.amx_gemm import can_pack_for_amx, is_packed_for_amx, pack_for_amx
from kernels.cpu.gemm.avx512_bf16_gemm import (
    can_pack_pairs,
    is_packed_pairs,
    pack_pairs,
)
from kernels.cpu.simd.cpu_features import has_amx, has_pair_products


def has_bf16_kernels() -> bool:
    return has_amx() or has_pair_products()


def can_pack_bf16(weight: Tensor) -> bool:
    return can_pack_for_amx(weight) or can_pack_pairs(weight)


def pack_bf16(weight: Tensor) -> Tensor:
    """Packs a weight for AMX or for pairs: the same bytes, in a different shape."""
    return pack_for_amx(weight) if can_pack_for_amx(weight) else pack_pairs(weight)


def is_packed_halves(weight: Tensor) -> bool:
    return is_packed_for_amx(weight) or is_packed_pairs(weight)
