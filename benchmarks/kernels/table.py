"""The benchmark of each operation that has a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.kernels import attention, gemm, moves, sampling
from benchmarks.kernels.timing import Found

OPS: dict[str, Callable[..., Iterator[Found]]] = {
    each.__name__: each
    for each in (
        attention.decode_attention,
        attention.prefill_attention,
        gemm.linear,
        gemm.compressed_linear,
        moves.decompress,
        moves.rms_norm,
        moves.add_rms_norm,
        moves.silu_and_mul,
        moves.gelu_and_mul,
        moves.clamped_gate,
        moves.rotate_and_store,
        moves.gather_blocks,
        moves.scatter_blocks,
        moves.copy_blocks,
        moves.penalize,
        moves.apply_token_mask,
        sampling.sample,
        sampling.top_k,
    )
}
