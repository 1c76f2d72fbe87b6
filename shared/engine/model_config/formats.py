"""The formats of quantized weights that are served, and the tensors of each.

Every number is w = round((code - zero) · scale), the product in FP32, rounded once to the dtype of
the computation. Codes, zeros and scales are those of the file.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import msgspec

from shared.errors import CheckpointError

FP8_BLOCK = 128  # rows and columns that share a scale
WORD_BITS = 32
ScaleDtype = Literal["BF16", "F16", "F32"]


class Int4(msgspec.Struct, frozen=True, kw_only=True, tag="int4"):
    """compressed-tensors' `pack-quantized` of four bits: w = (code - zero) · scale.

    `group` columns share a scale and a zero; 0 means all of a row. Symmetric codes have zero 8.
    `scale_dtype` is a safetensors name.
    """

    group: int
    is_symmetric: bool
    scale_dtype: ScaleDtype = "BF16"

    def __str__(self) -> str:
        return f"int4 in {_grouped(self.group)}, {_symmetry(self.is_symmetric)}"


class Packed(msgspec.Struct, frozen=True, kw_only=True, tag="packed"):
    """`pack-quantized` of four or eight bits, also with columns of a group anywhere: `is_ordered`
    (actorder "group", `weight_g_idx`). Other fields are those of `Int4`.
    """

    num_bits: Literal[4, 8]
    group: int
    is_symmetric: bool
    is_ordered: bool = False
    scale_dtype: ScaleDtype = "BF16"

    def __str__(self) -> str:
        order = ", with an order of columns" if self.is_ordered else ""
        symmetry = _symmetry(self.is_symmetric)
        return f"int{self.num_bits} in {_grouped(self.group)}, {symmetry}{order}"


class Int8(msgspec.Struct, frozen=True, kw_only=True, tag="int8"):
    """compressed-tensors' `int-quantized`: signed bytes, w = (code - zero) · scale. `group` is that
    of `Int4`; of a weight that `is_per_tensor` all numbers share a scale.
    """

    group: int
    is_symmetric: bool
    is_per_tensor: bool = False
    scale_dtype: ScaleDtype = "BF16"

    def __str__(self) -> str:
        group = "with a scale per tensor" if self.is_per_tensor else f"in {_grouped(self.group)}"
        return f"int8 bytes {group}, {_symmetry(self.is_symmetric)}"


class Awq(msgspec.Struct, frozen=True, kw_only=True, tag="awq"):
    """AutoAWQ's `gemm` packing of four bits: columns first, eight rows to a word in the order 0, 2,
    4, 6, 1, 3, 5, 7, lowest bits first. `group` is that of `Int4`.
    """

    group: int
    scale_dtype: ScaleDtype = "F16"

    def __str__(self) -> str:
        return f"awq in {_grouped(self.group)}"


class Gptq(msgspec.Struct, frozen=True, kw_only=True, tag="gptq"):
    """GPTQ's packing: columns first, columns of a row to a word, lowest bits first; zeros by rows.

    Version 1 stores zeros less one (`is_offset`). Columns of a group are anywhere if `is_ordered`
    (`desc_act`): `g_idx` has the group of each. `group` is that of `Int4`.
    """

    num_bits: Literal[4, 8]
    group: int
    is_symmetric: bool
    is_offset: bool
    is_ordered: bool = False
    scale_dtype: ScaleDtype = "F16"

    def __str__(self) -> str:
        order = ", with an order of columns" if self.is_ordered else ""
        symmetry = _symmetry(self.is_symmetric)
        return f"gptq of {self.num_bits} bits in {_grouped(self.group)}, {symmetry}{order}"


class Fp8Block(msgspec.Struct, frozen=True, kw_only=True, tag="fp8-block"):
    """FP8 with a scale of each 128 x 128: w = E4M3 code · scale. `scale` is the end of its name:
    DeepSeek-V3's is weight_scale_inv, compressed-tensors' weight_scale.
    """

    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale_inv"

    def __str__(self) -> str:
        return f"fp8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}"


class Fp8Rows(msgspec.Struct, frozen=True, kw_only=True, tag="fp8-rows"):
    """FP8 with a scale per row (channel), or one of the tensor: w = E4M3 code · scale. `scale` is
    the end of its name.
    """

    is_per_tensor: bool
    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    scale_dtype: ScaleDtype = "F32"

    def __str__(self) -> str:
        return f"fp8 with a scale per {'tensor' if self.is_per_tensor else 'channel'}"


class Mxfp4(msgspec.Struct, frozen=True, kw_only=True, tag="mxfp4"):
    """OCP Microscaling FP4 1.0, as gpt-oss has it: w = E2M1 code · 2^(scale - 127), a scale for 32
    columns; the code of the even column is the low nibble of a byte.
    """

    @property
    def group(self) -> int:
        return 32

    def __str__(self) -> str:
        return "mxfp4"


WeightFormat = Int4 | Packed | Int8 | Awq | Gptq | Fp8Block | Fp8Rows | Mxfp4
ORDERS = ("weight_g_idx", "g_idx")  # tensors with the group of each column
SCALES = ("weight_scale", "weight_scale_inv", "scales")
EXPONENTS = "weight_scales"  # of mxfp4, E8M0: 255 is NaN


class TensorSpec(NamedTuple):
    """The form of a tensor in a file. `dtype` is a safetensors name."""

    dtype: str
    shape: tuple[int, ...]


class Units(NamedTuple):
    """The rows and columns of a weight to one of a tensor; None: the tensor has one of all. If it
    is `by_columns`, its first dimension is that of columns. An order has no dimension of rows.
    """

    dtype: str
    rows: int | None = 1
    columns: int | None = 1
    by_columns: bool = False
    has_rows: bool = True


def units_of(form: WeightFormat) -> dict[str, Units]:
    """Returns the tensors of a weight by the ends of their names."""
    match form:
        case Int4() | Packed():
            return _packed(form)
        case Int8():
            group = None if form.is_per_tensor else form.group or None
            rows = None if form.is_per_tensor else 1
            found = {"weight": Units("I8"), "weight_scale": Units(form.scale_dtype, rows, group)}
            return found | _zeros("weight_zero_point", Units("I8", rows, group), form.is_symmetric)
        case Awq():
            group = form.group or None
            return {
                "qweight": Units("I32", 8, 1, by_columns=True),
                "qzeros": Units("I32", 8, group, by_columns=True),
                "scales": Units(form.scale_dtype, 1, group, by_columns=True),
            }
        case Gptq():
            group, codes = form.group or None, WORD_BITS // form.num_bits
            return {
                "qweight": Units("I32", 1, codes, by_columns=True),
                "qzeros": Units("I32", codes, group, by_columns=True),
                "scales": Units(form.scale_dtype, 1, group, by_columns=True),
                **_order("g_idx", is_ordered=form.is_ordered),
            }
        case Fp8Block():
            return {
                form.scale: Units("F32", FP8_BLOCK, FP8_BLOCK),
                "weight": Units("F8_E4M3"),
            }
        case Fp8Rows():
            rows = None if form.is_per_tensor else 1
            return {form.scale: Units(form.scale_dtype, rows, None), "weight": Units("F8_E4M3")}
        case Mxfp4():
            return {"weight_blocks": Units("U8", 1, 2), EXPONENTS: Units("U8", 1, form.group)}


def _packed(form: Int4 | Packed) -> dict[str, Units]:
    group = form.group or None
    num_bits = 4 if isinstance(form, Int4) else form.num_bits
    codes = WORD_BITS // num_bits
    zeros = Units("I32", codes, group)
    return {
        "weight_packed": Units("I32", 1, codes),
        **_zeros("weight_zero_point", zeros, form.is_symmetric),
        "weight_scale": Units(form.scale_dtype, 1, group),
        **_order("weight_g_idx", is_ordered=isinstance(form, Packed) and form.is_ordered),
    }


def _zeros(name: str, units: Units, is_symmetric: bool) -> dict[str, Units]:
    return {} if is_symmetric else {name: units}


def _order(name: str, *, is_ordered: bool) -> dict[str, Units]:
    return {name: Units("I32", None, 1, has_rows=False)} if is_ordered else {}


def stored_tensors(form: WeightFormat, num_rows: int, width: int) -> dict[str, TensorSpec]:
    """Returns the tensors of a weight [num_rows, width] by the ends of their names.

    Raises CheckpointError if groups do not fill a row, or rows or columns do not fill words.
    """
    num_groups(form, width)
    if isinstance(form, Awq | Gptq):
        _check_words(form, num_rows, width)
    return {
        kind: TensorSpec(units.dtype, _shape(units, num_rows, width))
        for kind, units in units_of(form).items()
    }


def _shape(units: Units, num_rows: int, width: int) -> tuple[int, ...]:
    rows = 1 if units.rows is None else -(-num_rows // units.rows)
    columns = 1 if units.columns is None else -(-width // units.columns)
    if not units.has_rows:
        return (columns,)
    if units.rows is None and units.columns is None:
        return (1,)
    return (columns, rows) if units.by_columns else (rows, columns)


def _check_words(form: Awq | Gptq, num_rows: int, width: int) -> None:
    codes = 8 if isinstance(form, Awq) else WORD_BITS // form.num_bits
    if num_rows % codes or (isinstance(form, Gptq) and width % codes):
        raise CheckpointError(
            f"a weight of {num_rows} rows and {width} columns does not fill words of {codes} codes"
        )


def group_of(form: WeightFormat) -> int:
    """Returns the columns of a group; 0: all."""
    return 0 if isinstance(form, Fp8Block | Fp8Rows) else form.group


def num_groups(form: WeightFormat, width: int) -> int:
    """Returns the number of groups of a row. Raises CheckpointError if they do not fill it."""
    group = group_of(form)
    if group and width % group:
        raise CheckpointError(f"rows of {width} columns are no multiple of group_size {group}")
    return width // group if group else 1


def num_stored_bytes(form: WeightFormat, num_rows: int, width: int) -> int:
    sizes = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
    return sum(
        sizes[dtype] * prod(shape)
        for dtype, shape in stored_tensors(form, num_rows, width).values()
    )


def _grouped(group: int) -> str:
    return f"groups of {group}" if group else "one group a row"


def _symmetry(is_symmetric: bool) -> str:
    return "symmetric" if is_symmetric else "asymmetric"
