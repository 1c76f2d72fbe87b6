"""A lossless BF16 weight [N, K] in about 12 bits per weight, decoded element by element.

    bits = sign << 15 | exponent << 7 | mantissa,   exponent = (base[n] + code) mod 256

The sign and the seven bits of the mantissa are noise and stored unchanged, a byte per weight. The
exponents of a row of a trained matrix are close together: a window of 16 of them, from the row's
`base`, contains all but one in 4,000 to 14,000 (rows normal or Student-t with 4 degrees of
freedom), and a code of four bits is the index in the window. Weights outside it are mostly far
below it, and must not be added to a finished sum, whose order that would change. So a group of
GROUP weights that has one is *wide*: its codes have eight bits, the upper four of them in a side
table. Eight bits cover every exponent, so any bit pattern is preserved, including infinities and
NaN; nothing is scaled or rounded.

    sign_mantissa  u8 [N, K]             sign << 7 | mantissa
    exponents      u8 [N, groups · 32]   codes: byte j of a group holds that of its weight j in the
                                         lower four bits, that of weight j + 32 in the upper ones
    base           u8 [N]                the base with the fewest wide groups
    is_wide        i32 [N, words]        bit g of word w: group 32 · w + g of the row is wide
    wide_start     i32 [N, words]        index in the side table of the word's first wide group; the
                                         others follow: start + the number of lower bits set
    wide_exponents u8 [num_wide, 32]     codes >> 4, packed like the lower bits in `exponents`

If K ends within a group, its codes are padded with zeros. A byte holds codes of both halves of a
group so that a tile of bytes decodes into two tiles of weights without a shuffle.

A shard of a layer for tensor parallelism is cut from this form without decoding: `rows` if ranks
share the output, `columns`, at group boundaries, if they share the input.

Why these sizes (`benchmarks/compression/memory.py`; rows normal to Student-t 4, bits per weight):
groups of 64 with upper bits in a side table 12.05 to 12.10, of 32 12.07 to 12.09, of 128 12.04 to
12.14, of 64 with complete exponents in it 12.06 to 12.15. One base per tensor makes 1.4 to 3 times
as many groups wide. A code reserved for zero shortens the window by one exponent, which doubles the
wide groups; a palette of any 16 exponents gains nothing, as the likely ones are consecutive. Three
bits per code would take 11.3 to 11.4 bits, but 1 to 2 % of all weights would escape: no tile of a
product would be without them, and each would be searched for in a list. FP16 has five exponent
bits, of which a code would save one, 6 % for a third plane: it is not compressed.

Source of the observation: DFloat11 (arXiv 2504.11651), Unweight and ZipServ; the form is Hearth's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.check_tensor import BadTensor

GROUP = 64  # weights along K whose halves share bytes
HALF = GROUP // 2
WORD_GROUPS = 32  # groups per word of bits
WINDOW = 16
LARGEST_BASE = 256 - WINDOW
PIECE_WEIGHTS = 1 << 22  # weights that are split at a time
# The minimum saving for a form to be used: below it, decoding costs more than it saves.
LEAST_SAVED = 1 / 16


@dataclass(frozen=True)
class SplitWeight:
    sign_mantissa: Tensor
    exponents: Tensor
    base: Tensor
    is_wide: Tensor
    wide_start: Tensor
    wide_exponents: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]"""
        return self.sign_mantissa.shape[0], self.sign_mantissa.shape[1]

    @property
    def device(self) -> torch.device:
        return self.sign_mantissa.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense weight."""
        return torch.bfloat16

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes().values())

    def numel(self) -> int:
        return self.sign_mantissa.numel()

    @property
    def num_verbatim(self) -> int:
        """The number of weights in wide groups."""
        return len(self.wide_exponents) * GROUP

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / max(self.numel(), 1)

    @property
    def wide_share(self) -> float:
        """The share of wide groups, which other formats store verbatim."""
        return len(self.wide_exponents) / max(self.exponents.numel() // HALF, 1)

    def planes(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, start: int, stop: int) -> SplitWeight:
        """Returns the form of weight[start:stop]: equal to the result of splitting that."""
        return _with_side_table(
            self.sign_mantissa[start:stop].contiguous(),
            self.exponents[start:stop].contiguous(),
            self.base[start:stop].contiguous(),
            self.wide_groups()[start:stop],
            self._wide_exponents_of(slice(start, stop), slice(None)),
        )

    def columns(self, start: int, stop: int) -> SplitWeight:
        """Returns a form of weight[:, start:stop] with the bases of this one. `start` and `stop`
        must be multiples of GROUP, or the end of K: otherwise raises BadTensor.
        """
        width = self.shape[1]
        if start % GROUP or (stop % GROUP and stop != width) or not 0 <= start <= stop <= width:
            raise BadTensor(
                f"columns {start} to {stop} of {width} cannot be cut off a split weight: "
                f"its group size is {GROUP}"
            )
        groups = slice(start // GROUP, -(-stop // GROUP))
        return _with_side_table(
            self.sign_mantissa[:, start:stop].contiguous(),
            self.exponents[:, groups.start * HALF : groups.stop * HALF].contiguous(),
            self.base,
            self.wide_groups()[:, groups],
            self._wide_exponents_of(slice(None), groups),
        )

    def wide_groups(self) -> Tensor:
        """[N, groups] bool"""
        bits = self.is_wide[:, :, None] >> torch.arange(WORD_GROUPS, device=self.device) & 1
        return bits.flatten(1)[:, : self.exponents.shape[1] // HALF].bool()

    def _wide_exponents_of(self, rows: slice, groups: slice) -> Tensor:
        is_wide = self.wide_groups()
        is_taken = torch.zeros_like(is_wide)
        is_taken[rows, groups] = True
        return self.wide_exponents[is_taken[is_wide]]


def split_weight(weight: Tensor, *, is_always: bool = False) -> SplitWeight | None:
    """weight [N, K] -> its split form, on the same device, or None if that saves too little.

    It saves too little for all dtypes but BF16, for a K far from a multiple of GROUP, and for
    weights whose exponents vary too much. With `is_always` any BF16 weight is split. Memory besides
    the form is about 30 bytes for each of PIECE_WEIGHTS weights. Raises BadTensor.
    """
    if weight.dtype != torch.bfloat16:
        if is_always:
            raise BadTensor(f"weight is {weight.dtype}, not torch.bfloat16")
        return None
    if weight.ndim != 2:
        raise BadTensor(f"weight has shape {list(weight.shape)}, not [any, any]")
    num_rows, width = weight.shape
    num_groups = -(-width // GROUP)
    planes = weight.device, torch.uint8
    sign_mantissa = _empty(*planes, num_rows, width)
    exponents = _empty(*planes, num_rows, num_groups * HALF)
    base = _empty(*planes, num_rows)
    is_wide = _empty(weight.device, torch.bool, num_rows, num_groups)
    upper = []
    num_at_once = max(1, PIECE_WEIGHTS // max(width, 1))
    for start in range(0, num_rows, num_at_once):
        piece = slice(start, start + num_at_once)
        bits = weight[piece].view(torch.int16)
        sign_mantissa[piece] = ((bits >> 8 & 0x80) | (bits & 0x7F)).to(torch.uint8)
        each = (bits >> 7).to(torch.uint8)  # the lower eight bits
        base[piece] = best_bases(each)
        lower, wider = _codes(each, base[piece])
        exponents[piece] = lower.flatten(1)
        is_wide[piece] = wider.any(-1)
        upper.append(wider[is_wide[piece]])
    table = torch.cat(upper) if upper else _empty(*planes, 0, HALF)
    form = _with_side_table(sign_mantissa, exponents, base, is_wide, table)
    is_worth_it = form.num_bytes <= weight.nbytes * (1 - LEAST_SAVED) and weight.numel() > 0
    return form if is_always or is_worth_it else None


def best_bases(exponents: Tensor) -> Tensor:
    """exponents u8 [R, K] -> u8 [R], for each row the base with the fewest wide groups.

    A group fits the bases from its largest exponent - 15 to its smallest: each opens and closes
    an interval, and the most intervals overlap at the best base. The lowest one among equals.
    """
    num_rows = len(exponents)
    smallest = _by_group(exponents, 255).amin(-1).int()
    largest = _by_group(exponents, 0).amax(-1).int()
    first = (largest - (WINDOW - 1)).clamp_(min=0)
    last = smallest.clamp_(max=LARGEST_BASE)
    fits = (first <= last).int()
    edges = exponents.new_zeros((num_rows, LARGEST_BASE + 2), dtype=torch.int32)
    edges.scatter_add_(1, first.clamp_(max=LARGEST_BASE).long(), fits)
    edges.scatter_add_(1, last.long() + 1, -fits)
    return edges.cumsum(1).argmax(1).to(torch.uint8)


def _codes(exponents: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lower and the upper four bits of codes: u8 [R, groups, 32] each."""
    codes = _by_group(exponents - base[:, None], 0)
    low, high = codes[..., :HALF], codes[..., HALF:]
    return low & 15 | high << 4, low >> 4 | high & 0xF0


def _by_group(rows: Tensor, padding: int) -> Tensor:
    """[R, K] -> [R, groups, 64]"""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP), value=padding)
    return padded.view(len(rows), padded.shape[1] // GROUP, GROUP)


def _with_side_table(
    sign_mantissa: Tensor, exponents: Tensor, base: Tensor, is_wide: Tensor, table: Tensor
) -> SplitWeight:
    """Returns the split weight. `is_wide` [N, groups] is bool; `table` has the wide groups in
    order.
    """
    num_rows, num_groups = is_wide.shape
    padded = torch.nn.functional.pad(is_wide, (0, -num_groups % WORD_GROUPS))
    bits = padded.view(num_rows, padded.shape[1] // WORD_GROUPS, WORD_GROUPS).long()
    words = (bits << torch.arange(WORD_GROUPS, device=bits.device)).sum(-1).int()
    counts = bits.sum(-1).flatten()
    starts = (counts.cumsum(0) - counts).view(words.shape).int()
    return SplitWeight(sign_mantissa, exponents, base, words, starts, table.contiguous())


def _empty(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
