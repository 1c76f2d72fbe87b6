"""Weights [N, K] of four or eight bits in the order that products read: tiles of 32 x 32.

    int4, int8    w = round((code - zero) · scale)     a scale, and maybe a zero, per row and group
    e4m3          w = round(E4M3(code) · scale)        a scale per row and group of K
    e2m1          w = E2M1(code) · 2^(scale - 127)     the same: MXFP4
    fp8           w = round(E4M3(code) · scale)        a scale per 128 x 128

The product is computed in FP32 and rounded once to `dtype`: the bits that a dequantized checkpoint
has. Transcoding (transcode.py) moves codes and scales, and changes none.

A tile of int4 or e2m1 is 512 bytes, nibbles [2, 4, 8, 2, 8]: nibble j of the word of half w, octet
o, row r and parity b, lower nibbles first, is row 8 · o + r and column 16 · w + 2 · j + b. Shifted
words then yield pairs of columns of eight rows, as pairs are multiplied. A tile of int8 or e4m3 is
1024 bytes, [16, 4, 8, 2]: byte (p, o, r, b) is row 8 · o + r and column 2 · p + b. A tile of fp8 is
1024 bytes, [16, 4, 2, 4, 2]: byte (p, a, h, c, b) is row 16 · h + 4 · a + c and column 2 · p + b,
the order in which bytes of two registers are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

BLOCK = 32
ALIGNMENT = 64
FP8_BLOCK = 128  # rows and columns that share a scale
PIECE_ROWS = 256  # that are transcoded, or dequantized, at a time

Code = Literal["int4", "int8", "e4m3", "e2m1"]
NIBBLES = ("int4", "e2m1")  # codes of four bits
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))  # the number of each code
PlaneShape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class GroupedLayout:
    """Layout of codes whose scale is that of their row and of `group` columns: a multiple of 32, or
    all. Scales are FP32, BF16 or FP16, those of e2m1 exponents in uint8; a zero is a byte.

    With `num_orders` the columns of a group are anywhere: each strip of 32 rows has one of so many
    orders, which tell the group of each column.
    """

    shape: tuple[int, int]
    group: int
    scale_dtype: str
    has_zeros: bool
    has_tiny_scales: bool = False
    code: Code = "int4"
    num_orders: int = 0

    @property
    def planes(self) -> dict[str, PlaneShape]:
        strips, steps = blocks(self.shape)
        groups = -(-self.shape[1] // self.group)
        tile_bytes = BLOCK * BLOCK // 2 if self.code in NIBBLES else BLOCK * BLOCK
        found: dict[str, PlaneShape] = {
            "codes": (torch.uint8, (strips, steps, tile_bytes)),
            "scales": (getattr(torch, self.scale_dtype), (strips, groups, BLOCK)),
        }
        if self.has_zeros:
            found["zeros"] = torch.uint8, (strips, groups, BLOCK)
        if self.num_orders:
            found["order"] = torch.int32, (strips,)
            found["groups"] = torch.int32, (self.num_orders, self.shape[1])
        return found

    @property
    def zero(self) -> int:
        """The zero of all codes without a plane of zeros."""
        return {"int4": 8, "int8": 128}.get(self.code, 0)


@dataclass(frozen=True)
class Fp8Layout:
    """Layout of FP8 weights. `scale_rows` rows of a strip share a scale: all 32, or 1 where a block
    ends in it.
    """

    shape: tuple[int, int]
    scale_rows: int

    @property
    def planes(self) -> dict[str, PlaneShape]:
        strips, steps = blocks(self.shape)
        scales = strips, BLOCK // self.scale_rows, -(-self.shape[1] // FP8_BLOCK)
        return {
            "codes": (torch.uint8, (strips, steps, BLOCK * BLOCK)),
            "scales": (torch.float32, scales),
        }


QuantizedLayout = GroupedLayout | Fp8Layout


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight. `memory` [num_bytes] uint8 holds all planes; `dtype` is that of the dense
    weight.
    """

    layout: QuantizedLayout
    memory: Tensor
    dtype: torch.dtype

    @cached_property
    def planes(self) -> dict[str, Tensor]:
        found, at = {}, 0
        for name, (dtype, shape) in self.layout.planes.items():
            num_bytes = prod(shape) * dtype.itemsize
            found[name] = self.memory[at : at + num_bytes].view(dtype).view(shape)
            at += aligned(num_bytes)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.shape

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def numel(self) -> int:
        return prod(self.shape)

    def strips(self, first: int, end: int) -> Tensor:
        """Returns the dense rows of strips [first, end) of 32 rows: [at most 32 ·
        (end - first), K].
        """
        planes = {
            name: plane if name == "groups" else plane[first:end]
            for name, plane in self.planes.items()
        }
        if isinstance(self.layout, GroupedLayout):
            numbers = _grouped_numbers(self.layout, planes)
        else:
            numbers = _fp8_numbers(self.layout, planes)
        num_rows, width = self.shape
        return numbers[: num_rows - first * BLOCK, :width].to(self.dtype)

    def dense(self) -> Tensor:
        """[N, K]"""
        num_strips = blocks(self.shape)[0]
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if out.is_meta:
            return out
        for first in range(0, num_strips, PIECE_ROWS // BLOCK):
            rows = self.strips(first, min(first + PIECE_ROWS // BLOCK, num_strips))
            out[first * BLOCK : first * BLOCK + len(rows)] = rows
        return out


def memory_bytes(layout: QuantizedLayout) -> int:
    planes = layout.planes.values()
    return sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in planes)


def blocks(shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the strips of 32 rows and the steps of 32 columns of a weight."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def int4_tiles(codes: Tensor) -> Tensor:
    """[32 · S, 32 · T] -> [S, T, 512]"""
    split = codes.view(len(codes) // BLOCK, 4, 8, codes.shape[1] // BLOCK, 2, 8, 2)
    ordered = split.permute(0, 3, 4, 1, 2, 6, 5).contiguous()  # s t w o r b j
    return (ordered[..., ::2] | ordered[..., 1::2] << 4).flatten(2)


def _int4_codes(tiles: Tensor) -> Tensor:
    """Returns the inverse of `int4_tiles`."""
    strips, steps = tiles.shape[:2]
    ordered = torch.stack((tiles & 15, tiles >> 4), -1).view(strips, steps, 2, 4, 8, 2, 8)
    return ordered.permute(0, 3, 4, 1, 2, 6, 5).reshape(BLOCK * strips, BLOCK * steps)


def byte_tiles(codes: Tensor) -> Tensor:
    """[32 · S, 32 · T] -> [S, T, 1024]"""
    split = codes.view(len(codes) // BLOCK, 4, 8, codes.shape[1] // BLOCK, 16, 2)
    return split.permute(0, 3, 4, 1, 2, 5).flatten(2)  # s t p o r b


def _byte_codes(tiles: Tensor) -> Tensor:
    """Returns the inverse of `byte_tiles`."""
    strips, steps = tiles.shape[:2]
    ordered = tiles.view(strips, steps, 16, 4, 8, 2)
    return ordered.permute(0, 3, 4, 1, 2, 5).reshape(BLOCK * strips, BLOCK * steps)


def fp8_tiles(codes: Tensor) -> Tensor:
    """[32 · S, 32 · T] -> [S, T, 1024]"""
    split = codes.view(len(codes) // BLOCK, 2, 4, 4, codes.shape[1] // BLOCK, 16, 2)
    return split.permute(0, 4, 5, 2, 1, 3, 6).flatten(2)  # s t p a h c b


def _fp8_codes(tiles: Tensor) -> Tensor:
    """Returns the inverse of `fp8_tiles`."""
    strips, steps = tiles.shape[:2]
    ordered = tiles.view(strips, steps, 16, 4, 2, 4, 2)
    return ordered.permute(0, 4, 3, 5, 1, 2, 6).reshape(BLOCK * strips, BLOCK * steps)


def _grouped_numbers(layout: GroupedLayout, planes: dict[str, Tensor]) -> Tensor:
    """FP32 [32 · S, 32 · T]"""
    if layout.code == "e2m1":
        table = torch.tensor(E2M1, device=planes["codes"].device)
        numbers = table[_int4_codes(planes["codes"]).long()]
    elif layout.code == "int4":
        numbers = _int4_codes(planes["codes"]).float()
    else:
        codes = _byte_codes(planes["codes"])
        numbers = (codes.view(torch.float8_e4m3fn) if layout.code == "e4m3" else codes).float()
    if layout.has_zeros:
        numbers.sub_(_of_columns(layout, planes, "zeros"))
    elif layout.zero:
        numbers.sub_(layout.zero)
    return numbers.mul_(_of_columns(layout, planes, "scales"))


def _of_columns(layout: GroupedLayout, planes: dict[str, Tensor], name: str) -> Tensor:
    """[S, groups, 32] -> FP32 [32 · S, 32 · T]"""
    plane, width = planes[name], layout.shape[1]
    plane = scale_numbers(plane) if name == "scales" else plane
    if layout.num_orders:
        groups = planes["groups"].index_select(0, planes["order"]).long()
        plane = plane.gather(1, groups.unsqueeze(2).expand(-1, -1, BLOCK))
    by_row = plane.transpose(1, 2).flatten(0, 1).float()
    spread = by_row if layout.num_orders else by_row.repeat_interleave(layout.group, 1)[:, :width]
    return torch.nn.functional.pad(spread, (0, -width % BLOCK))


def scale_numbers(scales: Tensor) -> Tensor:
    """Scales in FP32; of uint8 2^(e - 127), where 255 is NaN (E8M0)."""
    if scales.dtype != torch.uint8:
        return scales.float()
    powers = (scales.int() << 23).view(torch.float32)
    powers = torch.where(scales == 0, 2.0**-127, powers)
    return torch.where(scales == 255, torch.nan, powers)


def _fp8_numbers(layout: Fp8Layout, planes: dict[str, Tensor]) -> Tensor:
    """FP32 [32 · S, 32 · T]"""
    numbers = _fp8_codes(planes["codes"]).view(torch.float8_e4m3fn).float()
    scales = planes["scales"].repeat_interleave(layout.scale_rows, 1).flatten(0, 1)
    return numbers.mul_(scales.repeat_interleave(FP8_BLOCK, 1)[:, : numbers.shape[1]])
