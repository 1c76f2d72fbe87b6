"""Chooses the method of a weight by its form: once, when the weight is set."""

from __future__ import annotations

from typing import cast

from kernels.ops import (
    LaneWeight,
    QuantizedWeight,
    SplitWeight,
    SumLanes,
    Weight,
    is_cpu_compressed,
)
from shared.engine.layers.methods.compressed import CompressedMethod
from shared.engine.layers.methods.dense import DenseMethod
from shared.engine.layers.methods.linear_method import LinearMethod
from shared.engine.layers.methods.quantized import QuantizedMethod
from shared.engine.layers.methods.split_weight_method import SplitWeightMethod


def choose_method(
    weight: Weight, *, is_batch_invariant: bool, lanes: SumLanes | None = None
) -> LinearMethod:
    """Chooses the method for a weight. With `is_batch_invariant` a row's bits must not depend on
    the other rows. With `lanes` the GEMM is row-parallel, and sums over K in them.
    """
    if isinstance(weight, SplitWeight):
        return SplitWeightMethod(weight, is_batch_invariant=is_batch_invariant, lanes=lanes)
    if isinstance(weight, QuantizedWeight):
        return QuantizedMethod(weight, is_batch_invariant=is_batch_invariant, lanes=lanes)
    if is_cpu_compressed(weight):
        return CompressedMethod(weight, lanes=lanes)
    return DenseMethod(
        cast("LaneWeight", weight), is_batch_invariant=is_batch_invariant, lanes=lanes
    )
