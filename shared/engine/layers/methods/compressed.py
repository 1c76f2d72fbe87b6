"""A BF16 weight in 11.4 bits per element, decoded on a CPU just before it is multiplied."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import (
    CpuCompressed,
    argmax,
    cpu_compressed_linear,
    packed_argmax,
    packed_form,
    packed_logits,
    select_compressed_rows,
)


class CompressedMethod:
    """On CPUs a row's bits never depend on the other rows."""

    def __init__(self, weight: CpuCompressed) -> None:
        self.weight = weight
        self._packed = packed_form(weight)

    @property
    def has_custom_gemm(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return cpu_compressed_linear(x, self.weight, bias)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float() if self._packed is None else packed_logits(x, self._packed)

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x)) if self._packed is None else packed_argmax(x, self._packed)

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return select_compressed_rows(self.weight, row_ids)
