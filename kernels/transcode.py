"""Makes weights of four or eight bits in the order that products read from a checkpoint's tensors:
see quantized_weight.py.

A weight consists of parts, one below the other. They are transcoded some rows at a time, so that
unpacked codes of a few rows alone are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantized_weight import (
    BLOCK,
    FP8_BLOCK,
    NIBBLES,
    PIECE_ROWS,
    Code,
    Fp8Layout,
    GroupedLayout,
    QuantizedLayout,
    QuantizedWeight,
    blocks,
    byte_tiles,
    fp8_tiles,
    int4_tiles,
    memory_bytes,
    scale_numbers,
)

# Products of smaller scales may be subnormal: the CPU's conversion to BF16 rounds these to 0.
LEAST_SCALE = 2.0**-100


class CodePart(NamedTuple):
    """Rows whose codes have a scale, and maybe a zero, per row and group of columns."""

    num_rows: int
    codes: Callable[[int, int], Tensor]  # rows [first, end), first % 8 = 0 -> uint8 [., K]
    scale: Tensor  # [n, groups]
    zeros: Tensor | None = None  # uint8 [n, groups]
    groups: Tensor | None = None  # [K]: the group of each column; None: in order


class Int4Part(NamedTuple):
    """Rows as compressed-tensors stores them."""

    packed: Tensor  # int32 [n, ⌈K / 8⌉], low nibble first
    scale: Tensor  # [n, groups]
    zero_point: Tensor | None  # int32 [⌈n / 8⌉, groups], packed along the rows


class Fp8Part(NamedTuple):
    """Rows as DeepSeek-V3 stores them."""

    codes: Tensor  # float8_e4m3fn [n, K]
    scale: Tensor  # FP32 [⌈n / 128⌉, ⌈K / 128⌉]


def grouped_weight(
    parts: Sequence[CodePart],
    width: int,
    group: int,
    dtype: torch.dtype,
    *,
    code: Code,
    is_padded: bool = False,
) -> QuantizedWeight:
    """Returns the weight [N, width] of parts, one below the other.

    If `is_padded`, each part has rows of zeros up to full blocks of 32, as weights of experts have.
    Raises ValueError for parts within one block that differ in the groups of their columns.
    """
    placed = list(_placed(parts, is_padded=is_padded))
    orders = _distinct_orders(placed)
    scale_dtype = parts[0].scale.dtype
    is_kept = scale_dtype in (torch.bfloat16, torch.float16, torch.uint8)
    sizes = torch.stack([_least_scale(part.scale) for part in parts])
    layout = GroupedLayout(
        (sum(_num_rows(part.num_rows, is_padded=is_padded) for part in parts), width),
        group,
        str(scale_dtype).removeprefix("torch.") if is_kept else "float32",
        parts[0].zeros is not None,
        has_tiny_scales=not bool((sizes >= LEAST_SCALE).all()),
        code=code,
        num_orders=len(orders),
    )
    weight = _unset(layout, dtype, parts[0].scale.device)
    for index, groups in enumerate(orders):
        weight.planes["groups"][index] = groups
    tiles_of = int4_tiles if code in NIBBLES else byte_tiles
    for strip, part in placed:
        rows = slice(strip, strip + blocks((part.num_rows, 0))[0])
        weight.planes["scales"][rows] = _by_strips(part.scale)
        if part.zeros is not None:
            weight.planes["zeros"][rows] = _by_strips(part.zeros)
        if part.groups is not None:
            weight.planes["order"][rows] = _index_of(part.groups, orders)
        for first in range(0, part.num_rows, PIECE_ROWS):
            codes = part.codes(first, min(first + PIECE_ROWS, part.num_rows))
            at = strip + first // BLOCK
            tiles = tiles_of(_whole_blocks(codes))
            weight.planes["codes"][at : at + len(tiles)] = tiles
    return weight


def int4_weight(
    parts: Sequence[Int4Part],
    width: int,
    group: int,
    dtype: torch.dtype,
    *,
    is_padded: bool = False,
) -> QuantizedWeight:
    """Computes `grouped_weight` of parts as compressed-tensors stores them."""
    found = [packed_part(*part, width=width, num_bits=4) for part in parts]
    return grouped_weight(found, width, group, dtype, code="int4", is_padded=is_padded)


def packed_part(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    width: int,
    num_bits: int,
    groups: Tensor | None = None,
) -> CodePart:
    """packed int32, or bytes, [n, ⌈K / codes of a word⌉], lowest bits first; scale [n, groups];
    zero_point int32 [⌈n / codes of a word⌉, groups], packed along the rows.
    """
    zeros = None if zero_point is None else unpacked(zero_point.t(), num_bits)[:, : len(packed)].t()
    return CodePart(
        len(packed),
        lambda first, end: unpacked(packed[first:end], num_bits)[:, :width],
        scale,
        zeros,
        groups,
    )


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """int32 [n, m] -> codes [n, 32 / num_bits · m] uint8, lowest bits first."""
    whole = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return whole if num_bits == 8 else torch.stack((whole & 15, whole >> 4), -1).flatten(1)


def fp8_weight(
    parts: Sequence[Fp8Part], dtype: torch.dtype, *, is_padded: bool = False
) -> QuantizedWeight:
    """Parts, one below the other -> the weight; `is_padded` as in `grouped_weight`."""
    sizes = [len(part.codes) for part in parts]
    is_even = is_padded or _are_even(sizes)
    num_rows = sum(_num_rows(size, is_padded=is_padded) for size in sizes)
    layout = Fp8Layout((num_rows, parts[0].codes.shape[1]), BLOCK if is_even else 1)
    weight = _unset(layout, dtype, parts[0].codes.device)
    at = 0
    for part in parts:
        by_row = part.scale.float().repeat_interleave(FP8_BLOCK, 0)[: len(part.codes)]
        _place_scales(weight, at, by_row)
        at += _num_rows(len(part.codes), is_padded=is_padded)
    joined = [part.codes.view(torch.uint8) for part in parts]
    if not is_even:
        joined = [torch.cat(joined)]
    strip = 0
    for codes in joined:
        for first in range(0, len(codes), PIECE_ROWS):
            tiles = fp8_tiles(_whole_blocks(codes[first : first + PIECE_ROWS]))
            at = strip + first // BLOCK
            weight.planes["codes"][at : at + len(tiles)] = tiles
        strip += blocks((len(codes), 0))[0]
    return weight


def _place_scales(weight: QuantizedWeight, first_row: int, by_row: Tensor) -> None:
    """by_row [n, K / 128], of the rows from `first_row` on."""
    assert isinstance(weight.layout, Fp8Layout)
    step = weight.layout.scale_rows
    plane = weight.planes["scales"].flatten(0, 1)
    kept = by_row[::step]
    plane[first_row // step : first_row // step + len(kept)] = kept


def _placed(parts: Sequence[CodePart], *, is_padded: bool) -> Iterator[tuple[int, CodePart]]:
    """Returns the first strip of each part, where all begin with one; otherwise of
    all parts as one.
    """
    if not is_padded and not _are_even([part.num_rows for part in parts]):
        yield 0, _joined(parts)
        return
    strip = 0
    for part in parts:
        yield strip, part
        strip += blocks((part.num_rows, 0))[0]


def _are_even(sizes: Sequence[int]) -> bool:
    return all(size % BLOCK == 0 for size in sizes[:-1])


def _joined(parts: Sequence[CodePart]) -> CodePart:
    codes = torch.cat([part.codes(0, part.num_rows) for part in parts])
    zeros = [part.zeros for part in parts if part.zeros is not None]
    groups = [part.groups for part in parts if part.groups is not None]
    if any(not torch.equal(each, groups[0]) for each in groups):
        raise ValueError("parts of one block of 32 rows have different orders of columns")
    return CodePart(
        len(codes),
        lambda first, end: codes[first:end],
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
        groups[0] if groups else None,
    )


def _distinct_orders(placed: Sequence[tuple[int, CodePart]]) -> list[Tensor]:
    found: list[Tensor] = []
    for _, part in placed:
        if part.groups is not None and not any(torch.equal(part.groups, each) for each in found):
            found.append(part.groups)
    return found


def _index_of(groups: Tensor, orders: Sequence[Tensor]) -> int:
    return next(index for index, each in enumerate(orders) if torch.equal(groups, each))


def _least_scale(scales: Tensor) -> Tensor:
    """Returns the smallest magnitude that is not 0."""
    sizes = scale_numbers(scales).abs()
    return torch.where(sizes > 0, sizes, torch.inf).amin()


def _num_rows(num_rows: int, *, is_padded: bool) -> int:
    return blocks((num_rows, 0))[0] * BLOCK if is_padded else num_rows


def _unset(layout: QuantizedLayout, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:
    memory = torch.zeros(memory_bytes(layout), dtype=torch.uint8, device=device)
    return QuantizedWeight(layout, memory, dtype)


def _whole_blocks(rows: Tensor, columns: int = BLOCK) -> Tensor:
    """Pads [n, K] with zeros to full blocks of 32 rows and of `columns`."""
    below, behind = -rows.shape[0] % BLOCK, -rows.shape[1] % columns
    padded = torch.nn.functional.pad(rows, (0, behind, 0, below)) if below or behind else rows
    return padded.contiguous()


def _by_strips(rows: Tensor) -> Tensor:
    """[N, groups] -> [N / 32, groups, 32]"""
    whole = _whole_blocks(rows, columns=1)
    return whole.view(-1, BLOCK, whole.shape[1]).transpose(1, 2)
