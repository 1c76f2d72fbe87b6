"""Writes to the paged cache, and copies of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.attention import LATENT, ROTATED
from benchmarks.gpu_kit.cases.case import EPS, FP32, INT64, Build, Case, integers
from benchmarks.gpu_kit.session import Session

NUM_TOKENS = 64
NUM_LAYERS, NUM_BLOCKS = 2, 24  # of the cache whose blocks are copied
FIRST, MOVED = 5, 200  # tokens: neither begins nor ends with a block
NUM_COPIES = 8


def rotate_and_store(session: Session) -> Case:
    """The rotated queries, and the cache."""
    from kernels.gpu.kv.rotate_and_store import rotate_and_store as launch
    from kernels.reference.rotate_and_store import rotate_and_store as reference

    shapes = session.shapes
    num_heads = shapes.heads + 2 * shapes.kv_heads
    heads = session.random(NUM_TOKENS, num_heads, shapes.head_dim)
    cos, sin = _angles(session, shapes.head_dim // 2)
    cache = session.zeros(2, *_blocks(session), dtype=heads.dtype)
    slots = _slots(session)

    def on(store: Callable[..., Tensor], heads: Tensor, cache: Tensor) -> Tensor:
        query = store(heads, cos, sin, cache, slots)
        return torch.cat([query.flatten(), cache.flatten()])

    return Case(
        ("rotate_and_store",),
        lambda: on(launch, heads, cache),
        lambda: on(reference, heads.float(), cache.float().zero_()),
    )


def rotate_and_store_latent(session: Session) -> Case:
    """The rotated parts of 16 heads' queries, and the cache."""
    from kernels.gpu.kv.rotate_and_store_latent import rotate_and_store_latent as launch
    from kernels.reference.rotate_and_store_latent import rotate_and_store_latent as reference

    query = session.random(NUM_TOKENS, 16, ROTATED)
    latent = session.random(NUM_TOKENS, LATENT + ROTATED, seed=1)
    norm = session.random(LATENT, seed=2)
    cos, sin = _angles(session, ROTATED // 2)
    num_blocks, _, block_size, _ = _blocks(session)
    cache = session.zeros(1, num_blocks, 1, block_size, LATENT + ROTATED, dtype=query.dtype)
    slots = _slots(session)

    def on(store: Callable[..., Tensor], *given: Tensor) -> Tensor:
        *rows, norm, cache = given
        rotated = store(*rows, cos, sin, cache, slots, norm=norm, eps=EPS)
        return torch.cat([rotated.flatten(), cache.flatten()])

    wide = lambda: [each.float() for each in (query, latent, norm)]  # noqa: E731
    return Case(
        ("rotate_and_store_latent",),
        lambda: on(launch, query, latent, norm, cache),
        lambda: on(reference, *wide(), cache.float().zero_()),
    )


def gather_blocks(has_checksum: bool, session: Session) -> Case:
    """The payload, and its checksum."""
    from kernels.gpu.kv.gather_blocks import gather_blocks as launch
    from kernels.torch_ops.gather_blocks import gather_blocks as reference

    cache, table = _cache(session), _table(session)

    def on(move: Callable[..., None]) -> Tensor:
        out = session.zeros(*_payload(session), dtype=cache.dtype)
        checksum = session.zeros(1, dtype=INT64) if has_checksum else None
        move(cache, table, FIRST, MOVED, out, checksum=checksum)
        return _bits(out, checksum)

    return _copied("gather_blocks", lambda: on(launch), lambda: on(reference))


def scatter_blocks(has_checksum: bool, session: Session) -> Case:
    """The cache, and the checksum of the payload."""
    from kernels.gpu.kv.scatter_blocks import scatter_blocks as launch
    from kernels.torch_ops.scatter_blocks import scatter_blocks as reference

    payload, table = session.random(*_payload(session), seed=1), _table(session)

    def on(move: Callable[..., None]) -> Tensor:
        cache = _cache(session)
        checksum = session.zeros(1, dtype=INT64) if has_checksum else None
        move(cache, table, FIRST, MOVED, payload, checksum=checksum)
        return _bits(cache, checksum)

    return _copied("scatter_blocks", lambda: on(launch), lambda: on(reference))


def copy_blocks(session: Session) -> Case:
    """The cache; some blocks are both read and written."""
    from kernels.gpu.kv.copy_blocks import copy_blocks as launch
    from kernels.torch_ops.copy_blocks import copy_blocks as reference

    sources = integers(session, range(NUM_COPIES))
    destinations = integers(session, range(NUM_COPIES // 2, NUM_COPIES // 2 + NUM_COPIES))

    def on(copy: Callable[..., None]) -> Tensor:
        cache = _cache(session)
        copy(cache, sources, destinations)
        return cache

    return _copied("copy_blocks", lambda: on(launch), lambda: on(reference))


def _copied(op: str, launch: Callable[[], Tensor], wanted: Callable[[], Tensor]) -> Case:
    return Case((op,), launch, wanted, tolerance=0.0)


def _bits(copied: Tensor, checksum: Tensor | None) -> Tensor:
    """All bytes, so that a checksum is compared to its last bit."""
    parts = [copied] if checksum is None else [copied, checksum]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _angles(session: Session, half: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [NUM_TOKENS, half]; any numbers would do."""
    cos, sin = (session.random(NUM_TOKENS, half, dtype=FP32, seed=seed) for seed in (4, 5))
    return cos, sin


def _slots(session: Session) -> Tensor:
    """In falling order; every fifth token has none."""
    slots = range(NUM_TOKENS - 1, -1, -1)
    return integers(session, [-1 if slot % 5 == 2 else slot for slot in slots])


def _blocks(session: Session) -> tuple[int, int, int, int]:
    shapes = session.shapes
    num_blocks = -(-NUM_TOKENS // shapes.block_size)
    return num_blocks, shapes.kv_heads, shapes.block_size, shapes.head_dim


def _cache(session: Session) -> Tensor:
    return session.random(NUM_LAYERS, 2, NUM_BLOCKS, *_blocks(session)[1:])


def _payload(session: Session) -> tuple[int, ...]:
    return NUM_LAYERS, 2, MOVED, session.shapes.kv_heads, session.shapes.head_dim


def _table(session: Session) -> Tensor:
    return integers(session, range(NUM_BLOCKS - 1, -1, -1))


CASES: dict[str, Build] = {
    "rotate_and_store": rotate_and_store,
    **{
        name + (", checksum" if has_checksum else ""): partial(build, has_checksum)
        for has_checksum in (False, True)
        for name, build in (("gather_blocks", gather_blocks), ("scatter_blocks", scatter_blocks))
    },
    "copy_blocks": copy_blocks,
}
LATENT_CASES: dict[str, Build] = {"rotate_and_store_latent": rotate_and_store_latent}
