"""A BF16 weight in 11.4 bits per element, decoded on a CPU just before it is multiplied."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import (
    CpuCompressed,
    SumLanes,
    argmax,
    cpu_compressed_linear,
    lane_linear,
    lane_sums,
    packed_argmax,
    packed_form,
    packed_logits,
    select_compressed_rows,
)


class CompressedMethod:
    """Multiplies with a weight that is compressed for CPUs. A row's bits never depend on other
    rows.
    """

    def __init__(self, weight: CpuCompressed, *, lanes: SumLanes | None = None) -> None:
        self.weight = weight
        self._lanes = lanes
        self._packed = packed_form(weight)

    @property
    def has_custom_gemm(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._lanes is not None:
            return lane_linear(x, self.weight, bias, lanes=self._lanes)
        return cpu_compressed_linear(x, self.weight, bias)

    def partials(self, x: Tensor, num_sums: int = 1) -> Tensor:
        if self._lanes is None:
            raise ValueError("this GEMM does not sum in lanes")
        return lane_sums(x, self.weight, lanes=self._lanes, num_sums=num_sums)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float() if self._packed is None else packed_logits(x, self._packed)

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x)) if self._packed is None else packed_argmax(x, self._packed)

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return select_compressed_rows(self.weight, row_ids)
