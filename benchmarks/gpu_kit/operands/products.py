"""Operands of products at the shapes of a layer and of the head: dense, in lanes, split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from kernels.split_weight import SplitWeight
    from kernels.sum_lanes import SumLanes

WEIGHT_SCALE = 0.02
HEADS, HEAD_WIDTH = 16, 128  # latent attention of DeepSeek-V2-Lite


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
    """Returns the lanes in which the engine sums o and down."""
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
    """Returns the split form of a weight; without a device, planes of its sizes."""
    from kernels.split_weight import split_weight
    from tests.support.kernels.split_weights import empty_split

    if session.is_dry:
        return empty_split(*weight.shape)
    found = split_weight(weight, is_always=True)
    assert found is not None
    return found
