"""Compiles CPU kernels before the tests that use them, as a worker's start does: in child processes
that generate code once an operation, for half the time; tests of the engine find the code.
"""

from __future__ import annotations

from functools import cache

from kernels.ops import cpu_host


@cache
def compile_first(
    dtype: str, *, head_dim: int = 32, is_blocked: bool = False, is_compressed: bool = False
) -> None:
    """Compiles attention with and without masks, and layers. `head_dim` of a multiple of 32: of a
    cache that is read in place or in tiles, else of copies. `is_blocked`: fused layers.
    """
    host = cpu_host()
    if not host.has_kernels or (is_blocked and not host.has_gemm(dtype)):
        return
    plan = host.compile_plan(
        dtype=dtype,
        head_dim=head_dim,
        block_size=16,
        is_compressed=is_compressed,
        is_blocked=is_blocked,
        has_plain_attention=True,
        has_masked_attention=True,
        has_gelu=False,
    )
    host.compile_ahead(plan)
