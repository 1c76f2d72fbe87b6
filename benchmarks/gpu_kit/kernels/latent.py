"""Attention over latents, on the device's own time: one cached row a token for all heads.

A number of heads that does not compile or launch is a row with the error.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_kit.failures import recorded
from benchmarks.gpu_kit.kernels.timed import add_time
from benchmarks.gpu_kit.operands.columns import starts
from benchmarks.gpu_kit.operands.paged import LATENT, LATENT_SCALE, ROTATED, latents
from benchmarks.gpu_kit.session import Session

NUM_HEADS = (16, 8, 64, 128)  # DeepSeek-V2-Lite's; one rank's, and all, of Kimi K2 and DeepSeek-V3
NUM_SEQS = 64
BF16_BYTES = 2


def run(session: Session) -> None:
    failed: list[str] = []
    for num_heads in NUM_HEADS:
        for is_exact in (False, True):
            mode = "exact" if is_exact else "free"
            for name, measure in (("decode", decode), ("prefill", prefill)):
                case = f"{name}, {num_heads} heads, {mode}"
                with recorded(session, case, failed):
                    measure(session, case, num_heads, is_exact)


def decode(session: Session, case: str, num_heads: int, is_exact: bool) -> None:
    from kernels.gpu.attention.decode_attention import decode_attention

    context = session.shapes.context
    batch = latents(session, [context] * NUM_SEQS)
    query = session.random(NUM_SEQS, num_heads, LATENT + ROTATED)
    options: dict[str, Any] = {"value_dim": LATENT, "is_batch_invariant": is_exact}
    add_time(
        session,
        case,
        lambda: decode_attention(query, *batch.arguments, LATENT_SCALE, **options),
        num_bytes=NUM_SEQS * context * (LATENT + ROTATED) * BF16_BYTES,
        flops=_flops(NUM_SEQS * context, num_heads),
        kernels=("decode_attention",),
    )


def prefill(session: Session, case: str, num_heads: int, is_exact: bool) -> None:
    """Measures the prefill of a prompt without a cached prefix."""
    from kernels.gpu.attention.prefill_attention import prefill_attention

    num_tokens = session.shapes.context
    cache, tables, lens = latents(session, [num_tokens]).arguments
    query = session.random(num_tokens, num_heads, LATENT + ROTATED)
    given = (cache, tables, starts(session, [num_tokens]), lens, LATENT_SCALE)
    options: dict[str, Any] = {"value_dim": LATENT, "is_batch_invariant": is_exact}
    add_time(
        session,
        case,
        lambda: prefill_attention(query, *given, **options),
        num_bytes=BF16_BYTES * (query.numel() + num_tokens * num_heads * LATENT),
        flops=_flops(num_tokens * (num_tokens + 1) // 2, num_heads),
        kernels=("prefill_attention",),
    )


def _flops(num_pairs: int, num_heads: int) -> float:
    """Returns the operations of scores and weighted sums for pairs of a query's token and a cached
    one.
    """
    return 2.0 * num_pairs * num_heads * (2 * LATENT + ROTATED)
