"""Chooses the method of a weight by its form: once, when the weight is set."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import Weight
from kernels.split_weight import SplitWeight
from shared.engine.layers.methods.compressed import CompressedMethod
from shared.engine.layers.methods.dense import DenseMethod
from shared.engine.layers.methods.linear_method import LinearMethod
from shared.engine.layers.methods.split12 import Split12Method


def choose_method(weight: Weight, *, is_batch_invariant: bool) -> LinearMethod:
    """`is_batch_invariant`: a row's bits must not depend on the other rows."""
    if isinstance(weight, Tensor):
        return DenseMethod(weight, is_batch_invariant=is_batch_invariant)
    if isinstance(weight, SplitWeight):
        return Split12Method(weight, is_batch_invariant=is_batch_invariant)
    return CompressedMethod(weight)
