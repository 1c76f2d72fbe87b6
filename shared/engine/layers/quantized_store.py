"""The tensors of a quantized weight as its checkpoint has them, in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import QuantizedWeight, fp8_weight, grouped_weight
from shared.engine.layers.quantized_parts import code_of, code_part, fp8_part
from shared.engine.model_config.formats import (
    Fp8Block,
    TensorSpec,
    WeightFormat,
    group_of,
    stored_tensors,
)
from shared.errors import CheckpointError

DTYPES = {
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_ALIGNMENT = 4  # bytes: that of the widest dtype


class _Span(NamedTuple):
    part: int
    kind: str
    tensor: TensorSpec
    start: int  # bytes


@dataclass(frozen=True)
class QuantizedStore:
    """The quantized weights of linear layers with `rows` output rows each, one below the other, of
    `width` columns.

    A checkpoint fills `memory`; the kernels' form is made from it and replaces it. `dtype` is that
    of the dequantized weight.
    """

    form: WeightFormat
    rows: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        last = self._spans[-1]
        end = last.start + _num_bytes(last.tensor)
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    def parts(self, memory: Tensor) -> list[dict[str, Tensor]]:
        """Returns the tensors of each layer as views of `memory` [num_bytes] uint8."""
        found: list[dict[str, Tensor]] = [{} for _ in self.rows]
        for part, kind, (dtype, shape), start in self._spans:
            data = memory[start : start + prod(shape) * DTYPES[dtype].itemsize]
            found[part][kind] = data.view(DTYPES[dtype]).view(shape)
        return found

    def transcoded(self, memory: Tensor, *, is_padded: bool = False) -> QuantizedWeight:
        """Returns the weight in the order that kernels read. If `is_padded`, each layer
        has full blocks. Raises CheckpointError for an order of columns that layers do not share.
        """
        parts = self.parts(memory)
        form, group = self.form, group_of(self.form) or self.width
        if isinstance(form, Fp8Block):
            blocks = [fp8_part(form, each) for each in parts]
            return fp8_weight(blocks, self.dtype, is_padded=is_padded)
        found = [
            code_part(form, each, rows, self.width)
            for each, rows in zip(parts, self.rows, strict=True)
        ]
        try:
            return grouped_weight(
                found, self.width, group, self.dtype, code=code_of(form), is_padded=is_padded
            )
        except ValueError as error:
            raise CheckpointError(f"{form}: {error}") from None

    @cached_property
    def _spans(self) -> list[_Span]:
        """Wide dtypes first, so that each tensor is aligned without gaps."""
        found: list[tuple[int, str, TensorSpec]] = [
            (part, kind, tensor)
            for part, rows in enumerate(self.rows)
            for kind, tensor in stored_tensors(self.form, rows, self.width).items()
        ]
        found.sort(key=lambda each: -DTYPES[each[2].dtype].itemsize)
        spans, at = [], 0
        for part, kind, tensor in found:
            spans.append(_Span(part, kind, tensor, at))
            at += _num_bytes(tensor)
        return spans


def quantized_store(
    form: WeightFormat, rows: Sequence[int], width: int, dtype: torch.dtype
) -> QuantizedStore:
    """Raises CheckpointError if groups of columns do not fill a row."""
    stored_tensors(form, rows[0], width)
    return QuantizedStore(form, tuple(rows), width, dtype)


def _num_bytes(tensor: TensorSpec) -> int:
    return prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
