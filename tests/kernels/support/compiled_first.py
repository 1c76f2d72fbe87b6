"""Compiles CPU kernels before the tests that use them, as a worker's start does: in child processes
that generate code once an operation, for half the time; tests of the engine find the code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kernels.ops import cpu_host
from tests.support.kernels.compile_template import compile_in_child

INT4, FP8 = ("int4",), ("fp8",)


@cache
def compile_first(
    dtype: str, *, head_dim: int = 32, quantized: tuple[str, ...] = (), **fields: Any
) -> None:
    """Compiles attention and layers. `head_dim` of a multiple of 32: of a cache that is read in
    place or in tiles, else of copies. `quantized`: the kind of all weights, or none. `fields`:
    of the plan; `is_blocked`: fused layers.
    """
    host = cpu_host()
    if not host.has_kernels or (fields.get("is_blocked") and not host.has_gemm(dtype)):
        return
    plan: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "block_size": 16,
        "is_compressed": False,
        "is_blocked": False,
        "has_gelu": False,
        "quantized": 4 * quantized,
        "quantized_experts": 2 * quantized,
        **fields,
    }
    host.compile_ahead(host.compile_plan(**plan))


@cache
def compile_calls_first(run: Callable[[], object]) -> None:
    """Compiles what a function of a test's module calls."""
    if cpu_host().has_kernels:
        compile_in_child(run)


def compile_experts_first() -> None:
    """Of dense models in both dtypes, and of one with latents in FP8."""
    for dtype in ("float32", "bfloat16"):
        compile_first(dtype, head_dim=20, has_experts=True)
    compile_fp8_first()


def compile_fp8_first() -> None:
    compile_first("bfloat16", head_dim=20, quantized=FP8, has_experts=True, has_latents=True)


def compile_int4_first() -> None:
    compile_first("bfloat16", quantized=INT4, has_fp8_kv=True)
