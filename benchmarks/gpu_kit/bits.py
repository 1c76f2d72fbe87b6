"""Whether a row's bits depend on the other rows, on chunks, and on the form of the weights.

512 rows are computed together, and the first and last M of them alone, for M = 1 … 64: a row must
be identical to the last bit. So must a context that is computed in chunks, and a split weight's
product compared with the dense one's. The last row of the part is the verdict: `exact` is what a
worker guarantees by default, and whether this device satisfies it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_kit.session import Session

MANY_ROWS = 512
NUM_ROWS = (1, 2, 8, 16, 64)
CHUNKS = (64, 7, 512)
HIDDEN = (96, 1024, 2048, 4096, 8192)
SHAPES = ((6144, 4096), (28_672, 4096), (4096, 14_336))  # of Llama-3.1-8B: qkv, gate and up, down
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
NUM_PROMPT = 2100  # three segments

Op = Callable[[slice], Tensor]


def run(session: Session) -> None:
    session.need_device()
    torch.manual_seed(0)
    ops = {**_row_ops(), **_products()}
    results = [_rows_alone(session, name, op) for name, op in ops.items()]
    results += [_chunks(session), _split(session)]
    session.add(case="verdict", exact=all(results))
    for n, k in SHAPES:  # torch's default product, for comparison
        x, weight = _random(MANY_ROWS, k), _random(n, k)
        library = lambda rows: torch.nn.functional.linear(x[rows], weight)  # noqa: B023, E731
        _rows_alone(session, f"library's product {n} x {k}", library)
    if not all(results):
        raise RuntimeError("bits of a row depend on its batch, on chunks or on the weights' form")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _row_ops() -> dict[str, Op]:
    from kernels.gpu.rows.add_rms_norm import add_rms_norm
    from kernels.gpu.rows.rms_norm import rms_norm
    from kernels.gpu.rows.silu_and_mul import silu_and_mul

    def normed(hidden: int) -> Op:
        x, weight = _random(MANY_ROWS, hidden), _random(hidden)
        return lambda rows: rms_norm(x[rows].clone(), weight, 1e-5)

    def added(hidden: int) -> Op:
        x, weight = _random(MANY_ROWS, hidden), _random(hidden)
        return lambda rows: add_rms_norm(x[rows].clone(), x[rows].clone(), weight, 1e-5)[0]

    gate_up = _random(MANY_ROWS, 2 * 14_336)
    return {
        **{f"rms_norm of {hidden}": normed(hidden) for hidden in HIDDEN},
        **{f"add_rms_norm of {hidden}": added(hidden) for hidden in HIDDEN},
        "silu_and_mul": lambda rows: silu_and_mul(gate_up[rows].clone()),
        "rotate_and_store": _rotate_and_store(),
        "decode_attention": _decode_attention(),
    }


def _rotate_and_store() -> Op:
    from kernels.gpu.kv.rotate_and_store import rotate_and_store

    heads = _random(MANY_ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
    angles = torch.rand(MANY_ROWS, HEAD_DIM // 2, device="cuda")
    norms = {"query_norm": _random(HEAD_DIM), "key_norm": _random(HEAD_DIM), "eps": 1e-6}
    cache = _random(2, MANY_ROWS // BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, HEAD_DIM)

    def op(rows: slice) -> Tensor:
        slots = torch.arange(MANY_ROWS, device="cuda")[rows]
        angle = angles[rows]
        query = rotate_and_store(heads[rows], angle.cos(), angle.sin(), cache, slots, **norms)
        by_slot = cache.transpose(2, 3).flatten(1, 2)  # [2, slots, KV_HEADS, HEAD_DIM]
        return torch.cat([query, *by_slot[:, rows]], dim=1)

    return op


def _decode_attention() -> Op:
    from kernels.gpu.attention.decode_attention import decode_attention

    lens = torch.randint(1, NUM_PROMPT, (MANY_ROWS,), device="cuda", dtype=torch.int32)
    num_blocks = -(-NUM_PROMPT // BLOCK_SIZE)
    cache = _random(2, 4 * num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tables = torch.randint(4 * num_blocks, (MANY_ROWS, num_blocks), device="cuda").int()
    query = _random(MANY_ROWS, HEADS, HEAD_DIM)
    exact = {"is_batch_invariant": True}
    return lambda rows: decode_attention(
        query[rows].clone(), cache, tables[rows], lens[rows].clone(), 0.1, **exact
    )


def _products() -> dict[str, Op]:
    from kernels.gpu.gemm.linear import linear

    def product(n: int, k: int) -> Op:
        x, weight = _random(MANY_ROWS, k), _random(n, k)
        return lambda rows: linear(x[rows].clone(), weight, is_batch_invariant=True)

    return {f"linear {n} x {k}": product(n, k) for n, k in SHAPES}


def _rows_alone(session: Session, name: str, op: Op) -> bool:
    together = op(slice(0, MANY_ROWS))
    is_exact = True
    for num_rows in NUM_ROWS:
        first, last = slice(0, num_rows), slice(MANY_ROWS - num_rows, MANY_ROWS)
        is_exact &= _compare(
            session,
            f"{name}, {num_rows} of {MANY_ROWS} rows",
            torch.cat([op(first), op(last)]),
            torch.cat([together[first], together[last]]),
        )
    return is_exact


def _compare(session: Session, case: str, found: Tensor, wanted: Tensor) -> bool:
    """NaN, which is not equal to itself, is a failure, too."""
    is_equal = torch.equal(found, wanted)
    columns = {}
    if not is_equal:
        differs = (found != wanted).flatten(1)
        columns = {
            "rows_that_differ": round(float(differs.any(1).float().mean()), 4),
            "elements_that_differ": round(float(differs.float().mean()), 6),
            "most": float((found.float() - wanted.float()).abs().max()),
        }
    session.add(case=case, is_equal=is_equal, **columns)
    return is_equal


def _chunks(session: Session) -> bool:
    """A prompt's attention in one call, in chunks, and its last tokens as a decode step."""
    from kernels.gpu.attention.decode_attention import decode_attention
    from kernels.gpu.attention.prefill_attention import prefill_attention

    num_blocks = -(-NUM_PROMPT // BLOCK_SIZE)
    cache = _random(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    table = torch.randperm(num_blocks, device="cuda").int()[None]
    query = _random(NUM_PROMPT, HEADS, HEAD_DIM)

    def attended(first: int, end: int) -> Tensor:
        starts = torch.tensor([0, end - first], device="cuda", dtype=torch.int32)
        lens = torch.tensor([end], device="cuda", dtype=torch.int32)
        rows = query[first:end].clone()
        return prefill_attention(rows, cache, table, starts, lens, 0.1, is_batch_invariant=True)

    together = attended(0, NUM_PROMPT)
    is_exact = True
    for chunk in CHUNKS:
        starts = range(0, NUM_PROMPT, chunk)
        parts = [attended(start, min(start + chunk, NUM_PROMPT)) for start in starts]
        is_exact &= _compare(session, f"prefill in chunks of {chunk}", torch.cat(parts), together)
    positions = torch.tensor([0, 63, 1023, 1024, 2047, 2048, NUM_PROMPT - 1], device="cuda")
    decoded = decode_attention(
        *(query[positions], cache, table.expand(len(positions), -1)),
        *((positions + 1).int(), 0.1),
        is_batch_invariant=True,
    )
    return is_exact & _compare(session, "decode beside prefill", decoded, together[positions])


def _split(session: Session) -> bool:
    from kernels.gpu.gemm.compressed_linear import compressed_linear
    from kernels.gpu.gemm.linear import linear
    from kernels.split_weight import split_weight

    is_exact, exact = True, {"is_batch_invariant": True}
    for n, k in SHAPES:
        weight = _random(n, k) * 0.02
        split = split_weight(weight, is_always=True)
        assert split is not None
        for num_rows in (*NUM_ROWS, MANY_ROWS):
            x = _random(num_rows, k)
            found = compressed_linear(x, split, **exact), linear(x, weight, **exact)
            is_exact &= _compare(session, f"split {n} x {k}, {num_rows} rows", *found)
    return is_exact
