"""Unpacks the tensors of quantized layers as each format has them.

Sources: compressed-tensors' `pack_quantized` and `naive_quantized` compressors; AutoAWQ's
`packing_utils`; GPTQModel, which adds 1 to the zeros of version 1 in whole words, so that a zero
of 0, stored as all bits of a code, is restored with its borrow.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.ops import Code, CodePart, Fp8Part, packed_part, unpacked
from shared.engine.model_config.formats import (
    EXPONENTS,
    WORD_BITS,
    Awq,
    Fp8Block,
    Fp8Rows,
    Gptq,
    Int4,
    Int8,
    Mxfp4,
    Packed,
    WeightFormat,
)

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # the row of each code of a word, lowest bits first
_PLACES = tuple(AWQ_ROWS.index(row) for row in range(8))  # the code of each row
_SIGN = 128  # signed bytes plus this are codes


def code_of(form: WeightFormat) -> Code:
    """Returns the code of the kernels' layout."""
    match form:
        case Int4() | Awq() | Packed(num_bits=4) | Gptq(num_bits=4):
            return "int4"
        case Fp8Rows():
            return "e4m3"
        case Mxfp4():
            return "e2m1"
    return "int8"


def fp8_part(form: Fp8Block, tensors: Mapping[str, Tensor]) -> Fp8Part:
    return Fp8Part(tensors["weight"], tensors[form.scale])


def code_part(
    form: WeightFormat, tensors: Mapping[str, Tensor], num_rows: int, width: int
) -> CodePart:
    """Returns the rows of a layer [num_rows, width] whose `tensors` are those of its format."""
    match form:
        case Awq():
            return _awq_part(tensors, num_rows)
        case Mxfp4():
            return packed_part(
                tensors["weight_blocks"], tensors[EXPONENTS], None, width=width, num_bits=4
            )
        case Gptq():
            return _gptq_part(form, tensors, width)
        case Fp8Rows() | Int8():
            return _byte_part(form, tensors, num_rows)
        case Int4() | Packed():
            return packed_part(
                tensors["weight_packed"],
                tensors["weight_scale"],
                tensors.get("weight_zero_point"),
                width=width,
                num_bits=4 if isinstance(form, Int4) else form.num_bits,
                groups=tensors.get("weight_g_idx"),
            )
    raise TypeError(f"{form} has no codes of rows")


def _gptq_part(form: Gptq, tensors: Mapping[str, Tensor], width: int) -> CodePart:
    zeros = tensors["qzeros"].t()
    if form.is_offset:
        zeros = zeros + gptq_ones(form.num_bits)
    return packed_part(
        tensors["qweight"].t(),
        tensors["scales"].t(),
        None if form.is_symmetric else zeros,
        width=width,
        num_bits=form.num_bits,
        groups=tensors.get("g_idx"),
    )


def gptq_ones(num_bits: int) -> int:
    """Returns a word whose codes are 1."""
    return sum(1 << at for at in range(0, WORD_BITS, num_bits))


def _awq_part(tensors: Mapping[str, Tensor], num_rows: int) -> CodePart:
    words = tensors["qweight"]

    def codes(first: int, end: int) -> Tensor:
        return _awq_codes(words[:, first // 8 : -(-end // 8)])

    zeros = _awq_codes(tensors["qzeros"])
    return CodePart(num_rows, codes, tensors["scales"].t(), zeros)


def _awq_codes(words: Tensor) -> Tensor:
    """int32 [K, n / 8] -> codes [n, K] uint8"""
    in_words = unpacked(words, 4).view(len(words), -1, 8)
    return in_words[:, :, _PLACES].flatten(1).t()


def _byte_part(form: Fp8Rows | Int8, tensors: Mapping[str, Tensor], num_rows: int) -> CodePart:
    is_signed, stored = isinstance(form, Int8), tensors["weight"].view(torch.uint8)

    def codes(first: int, end: int) -> Tensor:
        rows = stored[first:end]
        return rows ^ _SIGN if is_signed else rows

    scale = tensors[form.scale if isinstance(form, Fp8Rows) else "weight_scale"]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _of_rows(zeros.view(torch.uint8) ^ _SIGN, num_rows)
    return CodePart(num_rows, codes, _of_rows(scale, num_rows), zeros)


def _of_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """[n, groups], also of a tensor [1] that all rows share."""
    return tensor.view(1, 1).expand(num_rows, 1) if tensor.dim() == 1 else tensor
