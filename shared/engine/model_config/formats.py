"""The formats of quantized weights that are served, and the tensors of each."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import msgspec

from shared.errors import CheckpointError

FP8_BLOCK = 128  # rows and columns that share a scale
_CODES = 8  # codes of four bits in an int32


class Int4(msgspec.Struct, frozen=True, kw_only=True, tag="int4"):
    """compressed-tensors' `pack-quantized` of four bits: w = (code - zero) · scale.

    `group` columns share a scale and a zero; 0 means all of a row. Symmetric codes have zero 8.
    `scale_dtype` is a safetensors name.
    """

    group: int
    is_symmetric: bool
    scale_dtype: Literal["BF16", "F32"] = "BF16"

    def __str__(self) -> str:
        group = f"groups of {self.group}" if self.group else "one group a row"
        return f"int4 in {group}, {'symmetric' if self.is_symmetric else 'asymmetric'}"


class Fp8Block(msgspec.Struct, frozen=True, kw_only=True, tag="fp8-block"):
    """DeepSeek-V3's blocks of 128 x 128: w = E4M3 code · scale, which is named weight_scale_inv."""

    def __str__(self) -> str:
        return f"fp8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}"


WeightFormat = Int4 | Fp8Block


class TensorSpec(NamedTuple):
    """The form of a tensor in a file. `dtype` is a safetensors name."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(form: WeightFormat, num_rows: int, width: int) -> dict[str, TensorSpec]:
    """Returns the tensors of a weight [num_rows, width] by the ends of their names.

    Raises CheckpointError if groups do not fill a row.
    """
    match form:
        case Int4():
            groups = num_groups(form, width)
            found = {"weight_packed": TensorSpec("I32", (num_rows, -(-width // _CODES)))}
            if not form.is_symmetric:
                zeros = TensorSpec("I32", (-(-num_rows // _CODES), groups))
                found["weight_zero_point"] = zeros
            return found | {"weight_scale": TensorSpec(form.scale_dtype, (num_rows, groups))}
        case Fp8Block():
            blocks = -(-num_rows // FP8_BLOCK), -(-width // FP8_BLOCK)
            return {
                "weight_scale_inv": TensorSpec("F32", blocks),
                "weight": TensorSpec("F8_E4M3", (num_rows, width)),
            }


def num_groups(form: Int4, width: int) -> int:
    """Returns the number of groups of a row. Raises CheckpointError if they do not fill it."""
    if form.group and width % form.group:
        raise CheckpointError(f"rows of {width} columns are no multiple of group_size {form.group}")
    return width // form.group if form.group else 1


def num_stored_bytes(form: WeightFormat, num_rows: int, width: int) -> int:
    sizes = {"I32": 4, "F32": 4, "BF16": 2, "F8_E4M3": 1}
    return sum(
        sizes[dtype] * prod(shape)
        for dtype, shape in stored_tensors(form, num_rows, width).values()
    )
