"""Operations whose cost is the bytes that they move: their rate over that of a copy.

Each yields a row for each of its shapes, with the share of a copy's bandwidth that it must reach; a
row whose time is the launch's has no bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.paged import (
    FP8,
    RUNS,
    Run,
    angles,
    layer_cache,
    scales,
    scattered_slots,
)
from benchmarks.kernels.timing import Found, by_bandwidth, random
from benchmarks.report import at_least
from kernels.gpu.gemm.decompress import decompress as decompress_kernel
from kernels.gpu.kv.copy_blocks import copy_blocks as copy_kernel
from kernels.gpu.kv.gather_blocks import gather_blocks as gather_kernel
from kernels.gpu.kv.rotate_and_store import rotate_and_store as rotate_kernel
from kernels.gpu.kv.scatter_blocks import scatter_blocks as scatter_kernel
from kernels.gpu.rows.add_rms_norm import add_rms_norm as add_norm_kernel
from kernels.gpu.rows.clamped_gate import clamped_gate as clamped_kernel
from kernels.gpu.rows.gelu_and_mul import gelu_and_mul as gelu_kernel
from kernels.gpu.rows.rms_norm import rms_norm as norm_kernel
from kernels.gpu.rows.silu_and_mul import silu_and_mul as silu_kernel
from kernels.gpu.sampling.apply_token_mask import apply_token_mask as mask_kernel
from kernels.gpu.sampling.penalize import penalize as penalize_kernel
from kernels.split_weight import SplitWeight, split_weight

EPS = 1e-5
NORM_SHAPES = ((32_768, 4096), (16_384, 8192), (1_048_576, 128))  # the last: norms of heads
GATE_WIDTHS = (14_336, 28_672, 1376)  # Llama 3's 8B and 70B; the last: 11,008 on eight GPUs
GATE_ELEMENTS = 128 << 20  # elements of gate and of up
HEADS_ELEMENTS = 192 << 20
LARGE_BYTES = 256 << 20
WEIGHTS = ((4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096))  # shapes of Llama 3.1 8B
NUM_ROWS, VOCAB_SIZE = 64, 128_256
FEW = 100 / VOCAB_SIZE
MANY_TOKENS = 8000
# of an entry that is read in order, and of a logit that is read and written at a random place: the
# minimum transfer
PENALTY_BYTES = 24 + 2 * 32


def _moved(
    op: str,
    case: str,
    launch: Callable[[], object],
    num_bytes: int,
    least: float | None = 0.85,
    **columns: Any,
) -> Found:
    row = {**by_bandwidth(case, launch, num_bytes), **columns}
    unit = "of copy"
    return row, [] if least is None else [at_least(f"{op}: {case}", row["of_copy"], least, unit)]


def rms_norm(shapes: Sequence[tuple[int, int]] = NORM_SHAPES) -> Iterator[Found]:
    """A row is read and written."""
    for num_rows, hidden in shapes:
        x, weight = random(num_rows, hidden), random(hidden)
        case = f"{num_rows} x {hidden}"
        yield _moved("rms_norm", case, lambda: norm_kernel(x, weight, EPS), 2 * x.nbytes)  # noqa: B023


def add_rms_norm() -> Iterator[Found]:
    """Two rows are read and two written."""
    for num_rows, hidden in NORM_SHAPES[:2]:
        x, residual, weight = random(num_rows, hidden), random(num_rows, hidden), random(hidden)
        yield _moved(
            "add_rms_norm",
            f"{num_rows} x {hidden}",
            lambda: add_norm_kernel(x, residual, weight, EPS),  # noqa: B023
            4 * x.nbytes,
        )


def silu_and_mul() -> Iterator[Found]:
    return _gated("silu_and_mul", silu_kernel)


def gelu_and_mul() -> Iterator[Found]:
    return _gated("gelu_and_mul", gelu_kernel)


def clamped_gate() -> Iterator[Found]:
    """Two rows are read, one is written; the biases of 32 experts come from the cache."""
    width, num_rows = 2880, GATE_ELEMENTS // 2880
    gate_up, bias = random(num_rows, 2 * width), random(32, 2 * width)
    experts = torch.arange(num_rows, device=gate_up.device) * 32 // num_rows

    def launch() -> Tensor:
        return clamped_kernel(gate_up, bias, experts, limit=7.0, alpha=1.702)

    yield _moved("clamped_gate", f"{num_rows} x {width}", launch, gate_up.nbytes * 3 // 2)


def _gated(op: str, kernel: Callable[[Tensor], Tensor]) -> Iterator[Found]:
    """Two rows are read, one is written."""
    for width in GATE_WIDTHS:
        num_tokens = GATE_ELEMENTS // width
        gate_up = random(num_tokens, 2 * width)
        case, num_bytes = f"{num_tokens} x {width}", gate_up.nbytes * 3 // 2
        yield _moved(op, case, lambda: kernel(gate_up), num_bytes)  # noqa: B023


def rotate_and_store() -> Iterator[Found]:
    """Queries, keys and values are read; queries are written, keys and values go to a cache in BF16
    or FP8. The last case is a decode step.
    """
    yield _rotated(32, 8, 128)
    yield _rotated(32, 8, 128, has_norm=True)
    yield _rotated(32, 8, 128, dtype=FP8)
    yield _rotated(64, 8, 128)
    yield _rotated(28, 4, 80)
    yield _rotated(8, 4, 256, has_norm=True)
    yield _rotated(32, 8, 128, num_tokens=64)


def _rotated(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    has_norm: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_tokens: int | None = None,
) -> Found:
    case = f"{num_heads} + 2 x {num_kv_heads} heads of {head_dim} to {dtype}"
    case += " with norms" if has_norm else ""
    least = 0.85 if num_tokens is None else None
    if num_tokens is None:
        num_tokens = HEADS_ELEMENTS // ((num_heads + 2 * num_kv_heads) * head_dim)
    else:
        case = f"a decode step of {num_tokens}, {case}"
    heads = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = angles(num_tokens, head_dim // 2)
    cache = layer_cache(num_tokens, num_kv_heads, head_dim, dtype)
    slots = scattered_slots(num_tokens)
    options: dict[str, Any] = {"kv_scales": scales(num_kv_heads) if dtype == FP8 else None}
    if has_norm:
        options |= {"query_norm": random(head_dim), "key_norm": random(head_dim), "eps": 1e-6}
    num_read = heads.nbytes + cos.nbytes + sin.nbytes + slots.nbytes
    num_queries, num_stored = num_heads * head_dim, 2 * num_kv_heads * head_dim
    num_written = num_tokens * (num_queries * heads.itemsize + num_stored * dtype.itemsize)
    return _moved(
        "rotate_and_store",
        case,
        lambda: rotate_kernel(heads, cos, sin, cache, slots, **options),
        num_read + num_written,
        least,
    )


def gather_blocks() -> Iterator[Found]:
    return _runs("gather_blocks", gather_kernel)


def scatter_blocks() -> Iterator[Found]:
    return _runs("scatter_blocks", scatter_kernel)


def _runs(op: str, kernel: Callable[..., None]) -> Iterator[Found]:
    """Each byte is read and written."""
    for case in RUNS:
        run = Run.of(case)
        yield _moved(op, str(case), lambda: run.move(kernel), 2 * run.payload.nbytes)  # noqa: B023


def copy_blocks() -> Iterator[Found]:
    """Blocks of Llama 3.1 8B's cache in BF16. Few are the forks of a few sequences."""
    cache = random(32, 2, 1024, 8, 16, 128)
    for num_copies in (1, 8, 128, 512):
        sources, destinations = torch.randperm(1024, device="cuda")[: 2 * num_copies].view(2, -1)
        num_bytes = 2 * cache.nbytes // 1024 * num_copies
        yield _moved(
            "copy_blocks",
            f"{num_copies} blocks",
            lambda: copy_kernel(cache, sources, destinations),  # noqa: B023
            num_bytes,
            0.85 if num_bytes >= LARGE_BYTES else None,
            mib=num_bytes >> 20,
        )


def split(weight: Tensor) -> SplitWeight:
    found = split_weight(weight, is_always=True)
    assert found is not None
    return found


def decompress(shapes: Sequence[tuple[int, int]] = WEIGHTS) -> Iterator[Found]:
    """12 bits of a weight are read and 16 written."""
    for n, k in shapes:
        weight = split(random(n, k))
        out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.device)
        num_bytes = weight.num_bytes + out.nbytes
        yield _moved(
            "decompress",
            f"{n} x {k}",
            lambda: decompress_kernel(weight, out),  # noqa: B023
            num_bytes,
            0.8,
        )


def apply_token_mask() -> Iterator[Found]:
    """A mask is read once, and -inf written for each token that it forbids; allowed logits are
    neither read nor written. A mask that forbids few costs the launch and its own bits.
    """
    for case, share, least in (("few allowed", FEW, 0.5), ("few forbidden", 1 - FEW, None)):
        logits = random(NUM_ROWS, VOCAB_SIZE).float()
        allowed = torch.rand(NUM_ROWS, VOCAB_SIZE // 32, 32, device="cuda") < share
        bits = torch.arange(32, device="cuda")
        words = (allowed.long() << bits).sum(-1).to(torch.int32)
        num_forbidden = allowed.numel() - int(allowed.sum())
        every_row = torch.arange(NUM_ROWS, device="cuda")
        yield _moved(
            "apply_token_mask",
            f"{NUM_ROWS} rows, {case}",
            lambda: mask_kernel(logits, every_row, words),  # noqa: B023
            words.numel() * 4 + num_forbidden * 4,
            least,
        )


def penalize() -> Iterator[Found]:
    """Sparse and in place; few entries cost the launch."""
    for num_tokens in (1000, MANY_TOKENS):
        logits = random(NUM_ROWS, VOCAB_SIZE).float()
        keys = torch.rand(NUM_ROWS, VOCAB_SIZE, device="cuda")
        ids = keys.argsort(-1)[:, :num_tokens].sort(-1).values.flatten()
        of_row = torch.arange(NUM_ROWS, device="cuda").repeat_interleave(num_tokens)
        repetition = torch.full_like(of_row, 1.1, dtype=torch.float32)
        subtracted = torch.full_like(of_row, 0.1, dtype=torch.float32)
        yield _moved(
            "penalize",
            f"{NUM_ROWS} x {num_tokens} tokens",
            lambda: penalize_kernel(logits, of_row, ids, repetition, subtracted),  # noqa: B023
            of_row.numel() * PENALTY_BYTES,
            0.5 if num_tokens == MANY_TOKENS else None,
        )
