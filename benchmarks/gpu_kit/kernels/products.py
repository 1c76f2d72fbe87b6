"""Products that the engine launches beside `linear`, on the device's own time.

lanes           o and down of a layer, summed in lanes
grouped         experts, of two mixtures of experts
int4_products   weights of four bits
fp8_products    weights of eight bits

Rows of mixtures compare with torch's grouped product, those of lanes with its product. A quantized
weight is decoded whole at every product; the prediction is for one that is decoded on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.kernels.timed import add_time, in_turn
from benchmarks.gpu_kit.operands import experts, products
from benchmarks.gpu_kit.operands.quantized import BUILDS
from benchmarks.gpu_kit.session import Session
from tests.support.kernels.cases.sizes import Mixture

BF16_BYTES = 2
NUM_ROWS = (1, 8, 64, 256)
NUM_TOKENS = (1, 64, 512)
QUANTIZED_ROWS = (1, 64)


def run(session: Session, what: str) -> None:
    {"lanes": lanes, "grouped": grouped}.get(what, quantized)(session, what)


def lanes(session: Session, _: str) -> None:
    from kernels.gpu.gemm.lane_linear import lane_linear

    for product in ("o", "down"):
        own = products.lanes_of(session, product)
        shape = products.weight_shape(session, product)
        weight = _weights(session, shape)
        for num_rows in NUM_ROWS:
            x = session.random(num_rows, shape[1])
            add_time(
                session,
                f"{product}, {num_rows} rows",
                lambda: lane_linear(x, weight(), lanes=own),  # noqa: B023
                library=lambda: torch.nn.functional.linear(x, weight()),  # noqa: B023
                num_bytes=_num_bytes(num_rows, *shape),
                flops=_flops(num_rows, *shape),
                kernels=("lane_linear",),
            )


def grouped(session: Session, _: str) -> None:
    for name in experts.MIXTURES:
        for product in experts.PRODUCTS:
            _grouped(session, name, product)


def _grouped(session: Session, name: str, product: str) -> None:
    mixture = experts.mixture_of(session, name)
    shape = mixture.weight_shape(product)
    own = experts.operands(session, mixture, product, max(NUM_TOKENS))
    for num_tokens in NUM_TOKENS:
        batches = _batches(session, mixture, num_tokens)
        first, turns = batches[0], cycle(batches)
        add_time(
            session,
            f"{name}, {product}, {num_tokens} tokens",
            lambda: own.launch(next(turns)),  # noqa: B023
            library=_library_grouped(own, first),
            num_bytes=_num_bytes(len(first.tokens), *shape, first.num_used),
            flops=_flops(len(first.tokens), *shape),
            kernels=("grouped_linear",),
            experts=first.num_used,
        )


def _batches(session: Session, mixture: Mixture, num_tokens: int) -> list[experts.Routed]:
    """Returns batches of different tokens, so that the experts of a few tokens are not cached from
    the batch before.
    """
    firsts = range(0, max(NUM_TOKENS) - num_tokens + 1, num_tokens)[: 1 if session.is_dry else 16]
    return [experts.routed(session, mixture, range(each, each + num_tokens)) for each in firsts]


def _library_grouped(own: experts.Operands, rows: experts.Routed) -> Callable[[], object] | None:
    """Returns torch's product of sorted rows; None where this torch has none."""
    product = getattr(torch.nn.functional, "grouped_mm", None)
    if product is None:
        return None
    x = own.x[rows.tokens if own.is_by_token else rows.choices]
    weight = own.weight.unflatten(0, (len(rows.bounds) - 1, -1)).transpose(1, 2)  # [E, K, N]
    ends = rows.offsets[1:].int()
    return lambda: product(x, weight, offs=ends)


def quantized(session: Session, what: str) -> None:
    from kernels.ops import linear, quantized_linear

    exact: dict[str, Any] = {"is_batch_invariant": True}
    for product in ("qkv", "down"):
        shape = products.weight_shape(session, product)
        weight, num_bytes = BUILDS[what](session, shape)
        dense = _weights(session, shape)
        for num_rows in QUANTIZED_ROWS:
            x = session.random(num_rows, shape[1])
            if weight is None:  # a dry run at the device's sizes only compiles
                linear(x, dense(), **exact)
                continue
            add_time(
                session,
                f"{product}, {num_rows} rows",
                lambda: quantized_linear(x, weight, **exact),  # noqa: B023
                library=lambda: linear(x, dense(), **exact),  # noqa: B023
                num_bytes=num_bytes,
                flops=_flops(num_rows, *shape),
                kernels=("linear",),
                how="decoded whole to BF16 by torch before every product",
            )


def _weights(session: Session, shape: tuple[int, int]) -> Callable[[], Tensor]:
    def make(seed: int) -> Tensor:
        return session.random(*shape, scale=products.WEIGHT_SCALE, seed=seed)

    return in_turn(session, make, BF16_BYTES * shape[0] * shape[1])


def _num_bytes(num_rows: int, num_columns: int, width: int, num_weights: int = 1) -> int:
    """Returns the bytes of x, y and the weights of [num_columns, width] that are read."""
    weights = num_weights * num_columns * width
    return BF16_BYTES * (weights + num_rows * (num_columns + width))


def _flops(num_rows: int, num_columns: int, width: int) -> float:
    return 2.0 * num_rows * num_columns * width
