"""Describes the host's CPU to the engine; see `kernels.ops.cpu_host`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import numba
from torch import Tensor

from kernels.cpu import probe, warm
from kernels.cpu.compile import compile_lock
from kernels.cpu.compile_plan import CompilePlan
from kernels.cpu.gemm import compressed_weight, grouped_linear, lane_linear, linear
from kernels.cpu.gemm.compressed_weight import CompressedWeight, WeightLayout
from kernels.cpu.gemm.lane_linear import LibraryLanes
from kernels.cpu.simd import cpu_features
from kernels.cpu.simd.intrinsics import FEW_ROWS
from kernels.cpu.simd.library_level import library_name
from kernels.sum_lanes import SumLanes


class CpuHost:
    few_rows = FEW_ROWS  # up to this many, cheap operations run on one thread

    @property
    def has_kernels(self) -> bool:
        """Whether compiled loops are used; otherwise the library is."""
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The reason that this host has no compiled loops; None if it has them."""
        return probe.failure()

    @property
    def has_amx(self) -> bool:
        return self.has_kernels and cpu_features.has_amx()

    @property
    def instruction_set(self) -> str:
        """amx, avx512bf16, avx512 or fma: the best that the compiled loops use; plain: no loops."""
        if not self.has_kernels:
            return "plain"
        if cpu_features.has_amx():
            return "amx"
        if cpu_features.has_pair_products():
            return "avx512bf16"
        return "avx512" if cpu_features.has_avx512() else "fma"

    def library_name(self, dtype: str = "") -> str:
        """See library_level.py: what determines the bits that torch's libraries compute."""
        return library_name(dtype)

    def compile_ahead(self, plan: CompilePlan) -> str | None:
        """See warm.py. Called before any weight is packed: the result decides its layout."""
        return warm.compile_ahead(plan)

    def is_compiled(self, plan: CompilePlan) -> bool:
        """Whether `compile_ahead` finds all machine code in the cache."""
        return warm.is_compiled(plan)

    def compile_rows(self, plan: CompilePlan, is_wanted: Callable[[], bool]) -> None:
        """See warm.py. Slow: runs in a background thread once the worker is ready."""
        warm.compile_rows(plan, is_wanted)

    def has_gemm(self, dtype: str) -> bool:
        """Whether a torch dtype has a compiled GEMM here, for weights that can be packed."""
        if dtype == "bfloat16":
            return cpu_features.has_pair_products() or cpu_features.has_amx()
        return dtype == "float32" and cpu_features.has_avx512()

    def compile_plan(self, **fields: Any) -> CompilePlan:
        return CompilePlan(**fields)

    def compile_lock(self) -> AbstractContextManager[None]:
        """Held while kernels are compiled, so that the host's other processes load the code."""
        return compile_lock()

    @property
    def num_threads(self) -> int:
        """Threads of the compiled loops that the calling thread starts."""
        return int(numba.get_num_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """Capped at numba's number of threads; tasks are assigned one by one, see simd/tasks.py."""
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        numba.set_parallel_chunksize(1)

    def pack_weight(self, weight: Tensor) -> Tensor:
        """weight [N, K] -> the weight in the layout that `linear` multiplies with."""
        pack = linear.pack_weight if self.has_kernels else linear.pack_for_library
        return pack(weight)

    def pack_lanes(self, weight: Tensor, lanes: SumLanes) -> Tensor | LibraryLanes:
        """weight [N, K] -> the weight in the layout that `lane_linear` multiplies with."""
        return lane_linear.pack_lanes(weight, lanes, has_kernels=self.has_kernels)

    def pack_experts(self, weight: Tensor) -> Tensor:
        """weight [E · N, K] -> the weight in the layout that `grouped_linear` multiplies with."""
        return grouped_linear.pack_experts(weight, has_kernels=self.has_kernels)

    def is_packed(self, weight: Tensor) -> bool:
        return linear.is_packed(weight)

    def weight_layouts(self) -> tuple[bool, ...]:
        """Returns what determines the layouts of packed and compressed weights, besides torch."""
        if not self.has_kernels:
            return False, False, False, False
        features = cpu_features
        return features.has_amx(), features.has_pair_products(), features.has_avx512(), True

    def compress_weight(self, weight: Tensor) -> CompressedWeight | None:
        """weight [N, K] -> its compressed form; None if it would not be smaller, or is not BF16."""
        return compressed_weight.compress_weight(weight) if self.has_kernels else None

    def is_compressed(self, weight: object) -> TypeGuard[CompressedWeight]:
        return isinstance(weight, CompressedWeight)

    def compressed_weight(
        self, shape: tuple[int, int], order: WeightLayout, num_verbatim: int, memory: Tensor
    ) -> CompressedWeight:
        """A weight over `memory` [n] uint8, which it references; nothing is copied."""
        return CompressedWeight(shape, order, num_verbatim, memory)
