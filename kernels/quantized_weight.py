"""Weights [N, K] of four or eight bits in the order that products read: tiles of 32 x 32.

    int4   w = round((code - zero) · scale)     a scale, and maybe a zero, per row and group of K
    fp8    w = round(E4M3(code) · scale)        a scale per 128 x 128

The product is computed in FP32 and rounded once to `dtype`: the bits that a dequantized checkpoint
has. Transcoding moves codes and scales, and changes none.

A tile of int4 is 512 bytes, nibbles [2, 4, 8, 2, 8]: nibble j of the word of half w, octet o, row
r and parity b, lower nibbles first, is row 8 · o + r and column 16 · w + 2 · j + b. Shifted words
then yield pairs of columns of eight rows, as pairs are multiplied. A tile of fp8 is 1024 bytes,
[16, 4, 2, 4, 2]: byte (p, a, h, c, b) is row 16 · h + 4 · a + c and column 2 · p + b, the order in
which bytes of two registers are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

BLOCK = 32
ALIGNMENT = 64
FP8_BLOCK = 128  # rows and columns that share a scale
PIECE_ROWS = 256  # that are transcoded at a time
# Products of smaller scales may be subnormal: the CPU's conversion to BF16 rounds these to 0.
LEAST_SCALE = 2.0**-100
SYMMETRIC_ZERO = 8  # zero point of int4


PlaneShape = tuple[torch.dtype, tuple[int, int, int]]


@dataclass(frozen=True)
class Int4Layout:
    """Layout of 4-bit weights. `group` columns share a scale: a multiple of 32, or all. Scales are
    FP32 or BF16.
    """

    shape: tuple[int, int]
    group: int
    scale_dtype: str
    has_zeros: bool
    has_tiny_scales: bool = False

    @property
    def planes(self) -> dict[str, PlaneShape]:
        strips, steps = _blocks(self.shape)
        groups = -(-self.shape[1] // self.group)
        scales = getattr(torch, self.scale_dtype), (strips, groups, BLOCK)
        found = {"codes": (torch.uint8, (strips, steps, BLOCK * BLOCK // 2)), "scales": scales}
        return found | ({"zeros": (torch.uint8, scales[1])} if self.has_zeros else {})


@dataclass(frozen=True)
class Fp8Layout:
    """Layout of FP8 weights. `scale_rows` rows of a strip share a scale: all 32, or 1 where a block
    ends in it.
    """

    shape: tuple[int, int]
    scale_rows: int

    @property
    def planes(self) -> dict[str, PlaneShape]:
        strips, steps = _blocks(self.shape)
        scales = strips, BLOCK // self.scale_rows, -(-self.shape[1] // FP8_BLOCK)
        return {
            "codes": (torch.uint8, (strips, steps, BLOCK * BLOCK)),
            "scales": (torch.float32, scales),
        }


QuantizedLayout = Int4Layout | Fp8Layout
_Part = TypeVar("_Part", "Int4Part", "Fp8Part")


class Int4Part(NamedTuple):
    """Rows as compressed-tensors stores them."""

    packed: Tensor  # int32 [n, ⌈K / 8⌉], low nibble first
    scale: Tensor  # [n, groups]
    zero_point: Tensor | None  # int32 [⌈n / 8⌉, groups], packed along the rows


class Fp8Part(NamedTuple):
    """Rows as DeepSeek-V3 stores them."""

    codes: Tensor  # float8_e4m3fn [n, K]
    scale: Tensor  # FP32 [⌈n / 128⌉, ⌈K / 128⌉]


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
            at += _aligned(num_bytes)
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
        planes = {name: plane[first:end] for name, plane in self.planes.items()}
        if isinstance(self.layout, Int4Layout):
            numbers = _int4_numbers(self.layout, planes)
        else:
            numbers = _fp8_numbers(self.layout, planes)
        num_rows, width = self.shape
        return numbers[: num_rows - first * BLOCK, :width].to(self.dtype)

    def dense(self) -> Tensor:
        """[N, K]"""
        num_strips = _blocks(self.shape)[0]
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if out.is_meta:
            return out
        for first in range(0, num_strips, PIECE_ROWS // BLOCK):
            rows = self.strips(first, min(first + PIECE_ROWS // BLOCK, num_strips))
            out[first * BLOCK : first * BLOCK + len(rows)] = rows
        return out


def memory_bytes(layout: QuantizedLayout) -> int:
    planes = layout.planes.values()
    return sum(_aligned(prod(shape) * dtype.itemsize) for dtype, shape in planes)


def int4_weight(
    parts: Sequence[Int4Part],
    width: int,
    group: int,
    dtype: torch.dtype,
    *,
    is_padded: bool = False,
) -> QuantizedWeight:
    """Parts, one below the other -> the weight [N, width]. FP16 scales are stored as FP32.

    If `is_padded`, each part has rows of zeros up to full blocks of 32, as weights of experts have.
    """
    sizes = torch.stack([_least_scale(part.scale) for part in parts])
    scale_dtype = parts[0].scale.dtype
    layout = Int4Layout(
        (sum(_num_rows(part.packed, is_padded=is_padded) for part in parts), width),
        group,
        "bfloat16" if scale_dtype == torch.bfloat16 else "float32",
        parts[0].zero_point is not None,
        has_tiny_scales=bool((sizes < LEAST_SCALE).any()),
    )
    weight = _unset(layout, dtype, parts[0].packed.device)
    for strip, part in _placed(parts, _joined_int4, is_padded=is_padded):
        num_strips = _blocks((len(part.packed), 0))[0]
        rows = slice(strip, strip + num_strips)
        weight.planes["scales"][rows] = _by_strips(part.scale)
        if part.zero_point is not None:
            weight.planes["zeros"][rows] = _by_strips(_row_zeros(part))
        for first, piece in _row_pieces(part.packed):
            tiles = _int4_tiles(_whole_blocks(_nibbles(piece)[:, :width]))
            weight.planes["codes"][strip + first : strip + first + len(tiles)] = tiles
    return weight


def fp8_weight(
    parts: Sequence[Fp8Part], dtype: torch.dtype, *, is_padded: bool = False
) -> QuantizedWeight:
    """Parts, one below the other -> the weight; `is_padded` as in `int4_weight`."""
    num_rows = sum(_num_rows(part.codes, is_padded=is_padded) for part in parts)
    is_even = is_padded or _are_even(parts)
    shape = num_rows, parts[0].codes.shape[1]
    layout = Fp8Layout(shape, BLOCK if is_even else 1)
    weight = _unset(layout, dtype, parts[0].codes.device)
    at = 0
    for part in parts:
        by_row = part.scale.float().repeat_interleave(FP8_BLOCK, 0)[: len(part.codes)]
        _place_scales(weight, at, by_row)
        at += _num_rows(part.codes, is_padded=is_padded)
    for strip, joined in _placed(parts, _joined_fp8, is_padded=is_padded):
        for first, piece in _row_pieces(joined.codes.view(torch.uint8)):
            tiles = _fp8_tiles(_whole_blocks(piece))
            weight.planes["codes"][strip + first : strip + first + len(tiles)] = tiles
    return weight


def _place_scales(weight: QuantizedWeight, first_row: int, by_row: Tensor) -> None:
    """by_row [n, K / 128], of the rows from `first_row` on."""
    assert isinstance(weight.layout, Fp8Layout)
    step = weight.layout.scale_rows
    plane = weight.planes["scales"].flatten(0, 1)
    kept = by_row[::step]
    plane[first_row // step : first_row // step + len(kept)] = kept


def _placed(
    parts: Sequence[_Part], join: Callable[[Sequence[_Part]], _Part], *, is_padded: bool
) -> Iterator[tuple[int, _Part]]:
    """Returns the first strip of each part, where all begin with one; otherwise of
    all parts as one.
    """
    if not is_padded and not _are_even(parts):
        yield 0, join(parts)
        return
    strip = 0
    for part in parts:
        yield strip, part
        strip += _blocks((len(part[0]), 0))[0]


def _are_even(parts: Sequence[Int4Part] | Sequence[Fp8Part]) -> bool:
    return all(len(part[0]) % BLOCK == 0 for part in parts[:-1])


def _joined_int4(parts: Sequence[Int4Part]) -> Int4Part:
    zeros = None
    if parts[0].zero_point is not None:
        by_row = torch.cat([_row_zeros(part) for part in parts])
        padded = torch.nn.functional.pad(by_row, (0, 0, 0, -len(by_row) % 8)).to(torch.int32)
        shifts = 4 * torch.arange(8, dtype=torch.int32, device=padded.device)
        words = padded.view(-1, 8, padded.shape[1]) << shifts[:, None]
        zeros = words.sum(1).to(torch.int32)
    packed = torch.cat([part.packed for part in parts])
    return Int4Part(packed, torch.cat([part.scale for part in parts]), zeros)


def _joined_fp8(parts: Sequence[Fp8Part]) -> Fp8Part:
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    return Fp8Part(codes.view(torch.float8_e4m3fn), parts[0].scale)


def _least_scale(scales: Tensor) -> Tensor:
    """Returns the smallest magnitude that is not 0."""
    sizes = scales.float().abs()
    return torch.where(sizes > 0, sizes, torch.inf).amin()


def _num_rows(codes: Tensor, *, is_padded: bool) -> int:
    return _blocks((len(codes), 0))[0] * BLOCK if is_padded else len(codes)


def _unset(layout: QuantizedLayout, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:
    memory = torch.zeros(memory_bytes(layout), dtype=torch.uint8, device=device)
    return QuantizedWeight(layout, memory, dtype)


def _row_pieces(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Returns the first strip of each piece, and its rows."""
    for start in range(0, len(rows), PIECE_ROWS):
        yield start // BLOCK, rows[start : start + PIECE_ROWS]


def _blocks(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _whole_blocks(rows: Tensor, columns: int = BLOCK) -> Tensor:
    """Pads [n, K] with zeros to full blocks of 32 rows and of `columns`."""
    below, behind = -rows.shape[0] % BLOCK, -rows.shape[1] % columns
    return torch.nn.functional.pad(rows, (0, behind, 0, below)) if below or behind else rows


def _by_strips(rows: Tensor) -> Tensor:
    """[N, groups] -> [N / 32, groups, 32]"""
    whole = _whole_blocks(rows, columns=1)
    return whole.view(-1, BLOCK, whole.shape[1]).transpose(1, 2)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [n, m] -> codes [n, 8 · m] uint8, low nibble first."""
    pairs = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _row_zeros(part: Int4Part) -> Tensor:
    """[n, groups] uint8"""
    assert part.zero_point is not None
    return _nibbles(part.zero_point.t())[:, : len(part.packed)].t()


def _int4_tiles(codes: Tensor) -> Tensor:
    """[32 · S, 32 · T] -> [S, T, 512]"""
    split = codes.view(len(codes) // BLOCK, 4, 8, codes.shape[1] // BLOCK, 2, 8, 2)
    ordered = split.permute(0, 3, 4, 1, 2, 6, 5).contiguous()  # s t w o r b j
    return (ordered[..., ::2] | ordered[..., 1::2] << 4).flatten(2)


def _int4_codes(tiles: Tensor) -> Tensor:
    """Returns the inverse of `_int4_tiles`."""
    strips, steps = tiles.shape[:2]
    ordered = torch.stack((tiles & 15, tiles >> 4), -1).view(strips, steps, 2, 4, 8, 2, 8)
    return ordered.permute(0, 3, 4, 1, 2, 6, 5).reshape(BLOCK * strips, BLOCK * steps)


def _fp8_tiles(codes: Tensor) -> Tensor:
    """[32 · S, 32 · T] -> [S, T, 1024]"""
    split = codes.view(len(codes) // BLOCK, 2, 4, 4, codes.shape[1] // BLOCK, 16, 2)
    return split.permute(0, 4, 5, 2, 1, 3, 6).flatten(2)  # s t p a h c b


def _fp8_codes(tiles: Tensor) -> Tensor:
    """Returns the inverse of `_fp8_tiles`."""
    strips, steps = tiles.shape[:2]
    ordered = tiles.view(strips, steps, 16, 4, 2, 4, 2)
    return ordered.permute(0, 4, 3, 5, 1, 2, 6).reshape(BLOCK * strips, BLOCK * steps)


def _int4_numbers(layout: Int4Layout, planes: dict[str, Tensor]) -> Tensor:
    """FP32 [32 · S, 32 · T]"""
    codes = _int4_codes(planes["codes"]).float()

    def of_columns(plane: Tensor) -> Tensor:
        """[S, groups, 32] -> [32 · S, 32 · T]"""
        by_row = plane.transpose(1, 2).flatten(0, 1).float()
        spread = by_row.repeat_interleave(layout.group, 1)
        return torch.nn.functional.pad(spread, (0, codes.shape[1] - spread.shape[1]))

    zeros = of_columns(planes["zeros"]) if layout.has_zeros else SYMMETRIC_ZERO
    return codes.sub_(zeros).mul_(of_columns(planes["scales"]))


def _fp8_numbers(layout: Fp8Layout, planes: dict[str, Tensor]) -> Tensor:
    """FP32 [32 · S, 32 · T]"""
    numbers = _fp8_codes(planes["codes"]).view(torch.float8_e4m3fn).float()
    scales = planes["scales"].repeat_interleave(layout.scale_rows, 1).flatten(0, 1)
    return numbers.mul_(scales.repeat_interleave(FP8_BLOCK, 1)[:, : numbers.shape[1]])
