"""Attention sinks: one more score of each head, of a key whose value is zero.

A row's weights are divided by their sum and the sink's weight. Both have the scale of the larger of
the row's largest score and the sink, so neither overflows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.intrinsics import LOG2_E, array, exp2

_f32 = np.float32


def sink_exponents(sinks: Tensor | None) -> Any:
    """sinks [num_heads] FP32 -> the same as exponents of 2; [0] for none, so that attention with
    and without sinks is one compiled variant.
    """
    return np.empty(0, _f32) if sinks is None else array(sinks * LOG2_E)


@compiled()
def sink_factor(top: Any, total: Any, sink: Any) -> Any:
    """Returns the factor of a row's sum of values. Its weights add up to `total`, with exponents
    relative to `top`.
    """
    higher = max(top, sink)
    kept = exp2(top - higher)
    return kept / (total * kept + exp2(sink - higher))
