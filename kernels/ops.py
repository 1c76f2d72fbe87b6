"""The engine's operations, each by the kernel for its tensors' device: the one place that chooses.

Shapes and formulas are described in `kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec

from torch import Tensor

from kernels.cpu import decode_attention as cpu_decode_attention
from kernels.cpu import gated as cpu_gated
from kernels.cpu import prefill_attention as cpu_prefill_attention
from kernels.cpu import rms_norm as cpu_rms_norm
from kernels.cpu import rotate_and_store as cpu_rotate_and_store
from kernels.reference.decode_attention import decode_attention as reference_decode_attention
from kernels.reference.gelu_and_mul import gelu_and_mul as reference_gelu_and_mul
from kernels.reference.prefill_attention import prefill_attention as reference_prefill_attention
from kernels.reference.rms_norm import rms_norm as reference_rms_norm
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotate_and_store
from kernels.reference.silu_and_mul import silu_and_mul as reference_silu_and_mul

P = ParamSpec("P")
Op = Callable[Concatenate[Tensor, P], Tensor]


def _by_device(on_cpu: Op[P], elsewhere: Op[P]) -> Op[P]:
    """An operation runs where its first tensor is."""

    def op(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return (on_cpu if first.is_cpu else elsewhere)(first, *args, **kwargs)

    return op


decode_attention = _by_device(cpu_decode_attention.decode_attention, reference_decode_attention)
gelu_and_mul = _by_device(cpu_gated.gelu_and_mul, reference_gelu_and_mul)
prefill_attention = _by_device(cpu_prefill_attention.prefill_attention, reference_prefill_attention)
rms_norm = _by_device(cpu_rms_norm.rms_norm, reference_rms_norm)
rotate_and_store = _by_device(cpu_rotate_and_store.rotate_and_store, reference_rotate_and_store)
silu_and_mul = _by_device(cpu_gated.silu_and_mul, reference_silu_and_mul)
