"""The instructions that compiled loops may use: those of numba's target, maybe not the host's.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` change the target. An intrinsic of an instruction that the
target lacks makes LLVM abort the process.
"""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import binding
from numba import config
from numba.core.codegen import get_host_cpu_features


@cache
def target_features() -> frozenset[str]:
    """LLVM's names of the features that numba compiles for."""
    features = config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    return frozenset(each[1:] for each in features.split(",") if each.startswith("+"))


def target_cpu() -> str:
    """LLVM's name of the CPU that numba compiles for."""
    return config.CPU_NAME or binding.get_host_cpu_name()


@cache
def has_fma() -> bool:
    """Whether numba's target has FMA: else every fused multiply-add is a call of the C library."""
    return "fma" in target_features()


@cache
def has_avx512() -> bool:
    """Whether numba's target has AVX-512: without, the library's FP32 GEMM is faster than ours."""
    return "avx512f" in target_features()


@cache
def has_pair_products() -> bool:
    """Whether AVX-512's dot products of BF16 pairs may be used."""
    return "avx512bf16" in target_features()


@cache
def has_amx() -> bool:
    """Whether this process may use BF16 tiles. The OS kernel grants them on request."""
    if not {"amx-tile", "amx-bf16"} <= target_features():
        return False
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
