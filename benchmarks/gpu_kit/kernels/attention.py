"""Attention over a paged cache by cuDNN beside this project's kernels, on the device's own time.

A case has the largest difference of both, the time of each, and what cuDNN takes to build a graph
of its shape. Ours is the free mode; `library_ms` is cuDNN's, called as a worker calls it: the rows
decide whether `--attention cudnn` is right, and faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_kit.failures import recorded
from benchmarks.gpu_kit.kernels.timed import add_time
from benchmarks.gpu_kit.operands.columns import starts
from benchmarks.gpu_kit.operands.paged import paged
from benchmarks.gpu_kit.session import Session, Unavailable
from shared.engine.layers.attention_backends.choice import MAX_ERROR, PACKAGE
from shared.engine.layers.attention_backends.cudnn import CudnnPrefill
from shared.engine.layers.attention_inputs import PrefillRows

BF16_BYTES = 2
NUM_DECODES = 64


def run(session: Session) -> None:
    if not session.is_dry and find_spec("cudnn") is None:
        raise Unavailable(f"{PACKAGE} is not installed")
    failed: list[str] = []
    whole = session.shapes.prompt  # 8,192
    cases = {
        "prompt": ([whole], [whole]),
        "half of a prompt after a prefix": ([whole // 2], [whole]),
        "chunk after a prompt": ([whole // 16], [whole + whole // 16]),
        "decode": ([1] * NUM_DECODES, [whole // 4] * NUM_DECODES),
    }
    for case, (query_lens, lens) in cases.items():
        with recorded(session, case, failed):
            compare(session, case, query_lens, lens)


def compare(session: Session, case: str, query_lens: Sequence[int], lens: Sequence[int]) -> None:
    """Measures a batch of sequences with these new tokens and contexts."""
    from kernels.gpu.attention.decode_attention import decode_attention
    from kernels.gpu.attention.prefill_attention import prefill_attention

    shapes = session.shapes
    scale = shapes.head_dim**-0.5
    batch = paged(session, lens)
    rows = PrefillRows(batch.tables, starts(session, query_lens), batch.lens, lower=None)
    query = session.random(sum(query_lens), shapes.heads, shapes.head_dim, seed=4)

    def ours() -> torch.Tensor:
        if max(query_lens) == 1:
            return decode_attention(query, *batch.arguments, scale)
        tables = batch.tables, rows.cu_seqlens_q, batch.lens
        return prefill_attention(query, batch.cache, *tables, scale)

    found: dict[str, Any] = {}
    library = None
    if not session.is_dry:
        cudnn = CudnnPrefill(import_module("cudnn"), scale)
        library = lambda: cudnn.attend(query, batch.cache, rows)  # noqa: E731
        found = _first(session, library, ours)
        if cudnn.failure:
            raise RuntimeError(f"cuDNN computes nothing: {cudnn.failure}")
    read = 2 * (sum(lens) * shapes.kv_heads + sum(query_lens) * shapes.heads)
    pairs = sum(new * (2 * end - new + 1) // 2 for new, end in zip(query_lens, lens, strict=True))
    add_time(
        session,
        case,
        ours,
        num_bytes=read * shapes.head_dim * BF16_BYTES,
        flops=4.0 * pairs * shapes.heads * shapes.head_dim,
        library=library,
        kernels=("prefill_attention", "decode_attention"),
        **found,
    )


def _first(session: Session, library: Any, ours: Any) -> dict[str, Any]:
    """Returns the columns of cuDNN's first call."""
    began = time.perf_counter()
    theirs = library()
    session.synchronize()
    build_ms = round((time.perf_counter() - began) * 1e3, 1)
    if theirs is None:
        return {}
    error = float((theirs.float() - ours().float()).abs().max())
    return {"build_ms": build_ms, "max_error": error, "ok": error <= MAX_ERROR}
