"""The engine's operations on some of the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.bit_checks.sizes import sizes_of
from benchmarks.gpu_kit.operands import experts, products
from benchmarks.gpu_kit.operands.columns import EPS, FP32, INT32, integers, sampling_columns
from benchmarks.gpu_kit.operands.paged import LATENT, LATENT_SCALE, ROTATED
from benchmarks.gpu_kit.session import Session

POOL = 4  # contexts of the longest prompt have room in the cache that all rows share


@dataclass(frozen=True)
class RowOp:
    """An operation on rows. `of` returns one row, of any shape, for each row of the slice."""

    kernels: tuple[str, ...]
    of: Callable[[slice], Tensor]


Build = Callable[[Session], RowOp]


def rms_norm(session: Session) -> RowOp:
    from kernels.gpu.rows.rms_norm import rms_norm as launch

    x, weight = _rows(session, session.shapes.hidden), session.random(session.shapes.hidden)
    return RowOp(("rms_norm",), lambda rows: launch(x[rows].clone(), weight, EPS))


def add_rms_norm(session: Session) -> RowOp:
    from kernels.gpu.rows.add_rms_norm import add_rms_norm as launch

    x, weight = _rows(session, session.shapes.hidden), session.random(session.shapes.hidden)
    residual = _rows(session, session.shapes.hidden, seed=1)
    return RowOp(
        ("add_rms_norm",),
        lambda rows: launch(x[rows].clone(), residual[rows].clone(), weight, EPS)[0],
    )


def silu_and_mul(session: Session) -> RowOp:
    from kernels.gpu.rows.silu_and_mul import silu_and_mul as launch

    gate_up = _rows(session, 2 * session.shapes.inner)
    return RowOp(("silu_and_mul",), lambda rows: launch(gate_up[rows].clone()))


def gelu_and_mul(session: Session) -> RowOp:
    from kernels.gpu.rows.gelu_and_mul import gelu_and_mul as launch

    gate_up = _rows(session, 2 * session.shapes.inner)
    return RowOp(("gelu_and_mul",), lambda rows: launch(gate_up[rows].clone()))


def clamped_gate(session: Session) -> RowOp:
    """Adds the biases of eight experts."""
    from kernels.gpu.rows.clamped_gate import clamped_gate as launch

    gate_up = _rows(session, 2 * session.shapes.inner)
    bias = session.random(8, 2 * session.shapes.inner, seed=1)
    experts = torch.arange(len(gate_up), device=session.device) % 8
    limits = {"limit": 7.0, "alpha": 1.702}
    return RowOp(
        ("clamped_gate",),
        lambda rows: launch(gate_up[rows].clone(), bias, experts[rows], **limits),
    )


def rotate_and_store(session: Session) -> RowOp:
    """Returns each row's query, stored key and stored value, with the norms of Qwen3's heads."""
    from kernels.gpu.kv.rotate_and_store import rotate_and_store as launch

    shapes, num_rows = session.shapes, sizes_of(session).many_rows
    heads = _rows(session, shapes.heads + 2 * shapes.kv_heads, shapes.head_dim)
    cos, sin = (_rows(session, shapes.head_dim // 2, dtype=FP32, seed=seed) for seed in (1, 2))
    norms: dict[str, Any] = {
        "query_norm": session.random(shapes.head_dim),
        "key_norm": session.random(shapes.head_dim, seed=1),
        "eps": EPS,
    }
    blocks = -(-num_rows // shapes.block_size), shapes.kv_heads, shapes.block_size
    cache = session.zeros(2, *blocks, shapes.head_dim, dtype=torch.bfloat16)
    slots = torch.arange(num_rows, device=session.device)

    def of(rows: slice) -> Tensor:
        query = launch(heads[rows], cos[rows], sin[rows], cache, slots[rows], **norms)
        by_slot = cache.transpose(2, 3).flatten(1, 2)  # [2, slots, kv_heads, head_dim]
        return torch.cat([query, *by_slot[:, rows]], dim=1)

    return RowOp(("rotate_and_store",), of)


def rotate_and_store_latent(session: Session) -> RowOp:
    """Returns the rotated parts of 16 heads' queries, and the stored row."""
    from kernels.gpu.kv.rotate_and_store_latent import rotate_and_store_latent as launch

    num_rows, block_size = sizes_of(session).many_rows, session.shapes.block_size
    query, latent = _rows(session, 16, ROTATED), _rows(session, LATENT + ROTATED, seed=1)
    cos, sin = (_rows(session, ROTATED // 2, dtype=FP32, seed=seed) for seed in (2, 3))
    norm = session.random(LATENT)
    shape = 1, -(-num_rows // block_size), 1, block_size, LATENT + ROTATED
    cache = session.zeros(*shape, dtype=torch.bfloat16)
    slots = torch.arange(num_rows, device=session.device)

    def of(rows: slice) -> Tensor:
        given = query[rows], latent[rows], cos[rows], sin[rows], cache, slots[rows]
        rotated = launch(*given, norm=norm, eps=EPS)
        return torch.cat([rotated.flatten(1), cache.view(-1, LATENT + ROTATED)[rows]], dim=1)

    return RowOp(("rotate_and_store_latent",), of)


def decode_attention(session: Session) -> RowOp:
    shapes = session.shapes
    return _decode(session, shapes.heads, shapes.kv_heads, shapes.head_dim, None)


def latent_decode(session: Session) -> RowOp:
    return _decode(session, 16, 1, LATENT + ROTATED, LATENT)


def _decode(
    session: Session, heads: int, kv_heads: int, head_dim: int, value_dim: int | None
) -> RowOp:
    """Contexts of all lengths, in blocks that sequences share."""
    from kernels.gpu.attention.decode_attention import decode_attention as launch

    sizes, block_size = sizes_of(session), session.shapes.block_size
    width = -(-sizes.prompt // block_size)
    planes = 2 if value_dim is None else 1
    cache = session.random(planes, POOL * width, kv_heads, block_size, head_dim, seed=1)
    query = _rows(session, heads, head_dim)
    rows = range(sizes.many_rows)
    lens = integers(session, [1 + row * 97 % sizes.prompt for row in rows])
    blocks = [each * 53 % (POOL * width) for each in range(len(rows) * width)]
    tables = integers(session, blocks, INT32).view(len(rows), width)
    scale = head_dim**-0.5 if value_dim is None else LATENT_SCALE
    options: dict[str, Any] = {"value_dim": value_dim, "is_batch_invariant": True}
    return RowOp(
        ("decode_attention",),
        lambda rows: launch(
            query[rows].clone(), cache, tables[rows], lens[rows].clone(), scale, **options
        ),
    )


def linear(product: str) -> Build:
    def build(session: Session) -> RowOp:
        from kernels.gpu.gemm.linear import linear as launch

        x, weight = products.operands(session, product, sizes_of(session).many_rows)
        return RowOp(
            ("linear",), lambda rows: launch(x[rows].clone(), weight, is_batch_invariant=True)
        )

    return build


def lane_linear(product: str) -> Build:
    def build(session: Session) -> RowOp:
        from kernels.gpu.gemm.lane_linear import lane_linear as launch

        x, weight = products.operands(session, product, sizes_of(session).many_rows)
        lanes = products.lanes_of(session, product)
        return RowOp(("lane_linear",), lambda rows: launch(x[rows].clone(), weight, lanes=lanes))

    return build


def grouped_linear(product: str) -> Build:
    """Returns the rows of a token's experts, one after the other, in the shapes of
    Qwen3-30B-A3B.
    """

    def build(session: Session) -> RowOp:
        mixture = experts.mixture_of(session, "Qwen3-30B-A3B")
        num_tokens = sizes_of(session).many_rows
        operands = experts.operands(session, mixture, product, num_tokens)

        def of(rows: slice) -> Tensor:
            tokens = range(num_tokens)[rows]
            routed = experts.routed(session, mixture, tokens)
            return operands.launch(routed)[routed.by_token].view(len(tokens), -1)

        return RowOp(("grouped_linear",), of)

    return build


def per_head_linear(session: Session) -> RowOp:
    from kernels.gpu.gemm.per_head_linear import per_head_linear as launch

    x = _rows(session, products.HEADS, products.HEAD_WIDTH)
    weight = session.random(products.HEADS, LATENT, products.HEAD_WIDTH, seed=1)
    return RowOp(("per_head_linear",), lambda rows: launch(x[rows].clone(), weight))


def route(session: Session) -> RowOp:
    """Returns the weights of the experts that each row chooses."""
    from kernels.gpu.moe.route import route as launch
    from shared.engine.model_config.moe_config import Routing

    mixture = experts.mixture_of(session, "Qwen3-30B-A3B")
    routing = Routing(score="softmax", is_renormalised=True)
    logits = _rows(session, mixture.num_experts, dtype=FP32)
    return RowOp(
        ("route",),
        lambda rows: launch(logits[rows].clone(), None, mixture.num_chosen, routing).weights,
    )


def add_experts(session: Session) -> RowOp:
    from kernels.gpu.moe.expert_rows import add_experts as launch

    mixture = experts.mixture_of(session, "Qwen3-30B-A3B")
    num_tokens = sizes_of(session).many_rows
    y = session.random(num_tokens * mixture.num_chosen, mixture.hidden)
    places = integers(session, range(len(y))).view(num_tokens, mixture.num_chosen)
    weights = _rows(session, mixture.num_chosen, dtype=FP32, seed=1)
    return RowOp(
        ("expert_rows",),
        lambda rows: launch(y, places[rows].clone(), weights[rows].clone(), None, mixture.hidden),
    )


def sample(session: Session) -> RowOp:
    from kernels.gpu.sampling.sample import sample as launch

    logits = _rows(session, session.shapes.vocab, dtype=FP32)
    columns = sampling_columns(session, len(logits))
    return RowOp(
        ("sample",),
        lambda rows: launch(logits[rows], *(each[rows].clone() for each in columns.values())),
    )


def top_k(session: Session) -> RowOp:
    from kernels.gpu.sampling.top_k import top_k as launch

    logits = _rows(session, session.shapes.vocab, dtype=FP32)
    return RowOp(("top_k",), lambda rows: launch(logits[rows], 20))


def _rows(
    session: Session, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensor:
    return session.random(sizes_of(session).many_rows, *shape, dtype=dtype, seed=seed)


MAIN: dict[str, Build] = {  # operations of a layer of a dense model
    **{f"linear {product}": linear(product) for product in ("qkv", "gate_up")},
    **{f"lane_linear {product}": lane_linear(product) for product in ("o", "down")},
    "decode_attention": decode_attention,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "rotate_and_store": rotate_and_store,
}
OTHERS: dict[str, Build] = {
    "head": linear("head"),
    "sample": sample,
    "top_k": top_k,
    "gelu_and_mul": gelu_and_mul,
    "clamped_gate": clamped_gate,
    **{f"grouped_linear {product}": grouped_linear(product) for product in ("gate_up", "down")},
    "per_head_linear": per_head_linear,
    "route": route,
    "add_experts": add_experts,
    "latent decode": latent_decode,
    "rotate_and_store_latent": rotate_and_store_latent,
}
