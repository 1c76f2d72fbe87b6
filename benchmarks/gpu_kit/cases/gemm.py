"""Products at the shapes of a layer and of the head: dense, in lanes, with split weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.case import Build, Case
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from kernels.split_weight import SplitWeight
    from kernels.sum_lanes import SumLanes

NUM_ROWS = (1, 64, 512)
WEIGHT_SCALE = 0.02
HEADS, HEAD_WIDTH, LATENT_WIDTH = 16, 128, 512  # latent attention of DeepSeek-V2-Lite


def weight_shape(session: Session, product: str) -> tuple[int, int]:
    """[N, K] of the fused products qkv and gate_up, of o, down and head."""
    shapes = session.shapes
    width = shapes.heads * shapes.head_dim
    return {
        "qkv": ((shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim, shapes.hidden),
        "o": (shapes.hidden, width),
        "gate_up": (2 * shapes.inner, shapes.hidden),
        "down": (shapes.hidden, shapes.inner),
        "head": (shapes.vocab, shapes.hidden),
    }[product]


def lanes_of(session: Session, product: str) -> SumLanes:
    """The lanes in which the engine sums o and down."""
    from kernels.sum_lanes import SumLanes
    from shared.engine.parallel.cuts import column_lanes, head_lanes

    shapes = session.shapes
    if product == "o":
        return SumLanes.of(head_lanes(shapes.heads, shapes.head_dim))
    return SumLanes.of(column_lanes(shapes.inner))


def operands(session: Session, product: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """x [num_rows, K] and the weight [N, K]."""
    num_columns, width = weight_shape(session, product)
    weight = session.random(num_columns, width, scale=WEIGHT_SCALE, seed=1)
    return session.random(num_rows, width), weight


def split_of(session: Session, weight: Tensor) -> SplitWeight:
    """The split form of a weight; without a device, planes of its sizes."""
    from kernels.split_weight import GROUP, HALF, WORD_GROUPS, SplitWeight, split_weight

    if not session.is_dry:
        found = split_weight(weight, is_always=True)
        assert found is not None
        return found
    num_rows, width = weight.shape
    num_groups = -(-width // GROUP)
    num_words = -(-num_groups // WORD_GROUPS)
    planes = {
        "sign_mantissa": (num_rows, width),
        "exponents": (num_rows, num_groups * HALF),
        "base": (num_rows,),
        "wide_exponents": (1, HALF),
    }
    words = {"is_wide": (num_rows, num_words), "wide_start": (num_rows, num_words)}
    return SplitWeight(
        **{name: session.empty(*shape, dtype=torch.uint8) for name, shape in planes.items()},
        **{name: session.empty(*shape, dtype=torch.int32) for name, shape in words.items()},
    )


def linear(product: str, num_rows: int, is_exact: bool, session: Session) -> Case:
    from kernels.gpu.gemm.linear import linear as launch

    x, weight = operands(session, product, num_rows)
    return Case(
        ("linear",),
        lambda: launch(x, weight, is_batch_invariant=is_exact),
        lambda: x.float() @ weight.float().T,
        is_exact=is_exact,
    )


def lane_linear(product: str, num_rows: int, session: Session) -> Case:
    from kernels.gpu.gemm.lane_linear import lane_linear as launch

    x, weight = operands(session, product, num_rows)
    lanes = lanes_of(session, product)
    return Case(
        ("lane_linear",),
        lambda: launch(x, weight, lanes=lanes),
        lambda: x.float() @ weight.float().T,
    )


def compressed_linear(product: str, num_rows: int, is_exact: bool, session: Session) -> Case:
    from kernels.gpu.gemm.compressed_linear import compressed_linear as launch

    x, weight = operands(session, product, num_rows)
    split = split_of(session, weight)
    return Case(
        ("compressed_linear",),
        lambda: launch(x, split, is_batch_invariant=is_exact),
        lambda: x.float() @ weight.float().T,
        is_exact=is_exact,
    )


def decompress(session: Session) -> Case:
    from kernels.gpu.gemm.decompress import decompress as launch

    _, weight = operands(session, "o", 1)
    split = split_of(session, weight)
    return Case(("decompress",), lambda: launch(split), lambda: weight, tolerance=0.0)


def per_head_linear(num_rows: int, session: Session) -> Case:
    """16 heads of latent attention: keys into the latent space."""
    from kernels.gpu.gemm.per_head_linear import per_head_linear as launch
    from kernels.reference.linear import per_head_linear as reference

    x = session.random(num_rows, HEADS, HEAD_WIDTH)
    weight = session.random(HEADS, LATENT_WIDTH, HEAD_WIDTH, scale=WEIGHT_SCALE, seed=1)
    return Case(
        ("per_head_linear",),
        lambda: launch(x, weight),
        lambda: reference(x.float(), weight.float()),
    )


def _named(op: str, product: str, num_rows: int, is_exact: bool | None = None) -> str:
    mode = {None: "", True: ", exact", False: ", free"}[is_exact]
    return f"{op} {product}, {num_rows} rows{mode}"


CASES: dict[str, Build] = {
    **{
        _named("linear", product, num_rows, is_exact): partial(linear, product, num_rows, is_exact)
        for is_exact in (True, False)
        for num_rows in NUM_ROWS
        for product in ("qkv", "gate_up")
    },
    **{
        _named("lane_linear", product, num_rows): partial(lane_linear, product, num_rows)
        for num_rows in NUM_ROWS
        for product in ("o", "down")
    },
    "head, 64 rows": partial(linear, "head", 64, True),
    "per_head_linear, 64 rows": partial(per_head_linear, 64),
    **{
        _named("compressed_linear", "qkv", num_rows, is_exact): partial(
            compressed_linear, "qkv", num_rows, is_exact
        )
        for is_exact in (True, False)
        for num_rows in (1, 64)
    },
    "decompress": decompress,
}
