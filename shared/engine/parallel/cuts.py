"""Cuts a weight to the part that a rank of tensor parallelism holds.

Column-parallel weights are cut by rows: heads of QKV, columns of the MLP, tokens of the
vocabulary. Row-parallel weights are cut by columns of K, at the borders of sum lanes. One rank of
1, 2, 4 or 8 holds aligned lanes; all cuts follow from `lane_borders`, so that what one GEMM
writes is what the next one reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from shared.engine.parallel.lanes import lane_borders, rank_lanes

BLOCK = 32  # columns of a unit of `down_proj`, and rows of a unit of the vocabulary
Range = tuple[int, int]  # first, end


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor [N, ...] or [N, K]. None: all of a dimension.

    `rows` are ranges of the first dimension, one after the other in the part: a rank's part of
    fused projections has several. `columns` is a range of the second dimension.
    """

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the part of a tensor of shape `full`. Raises ValueError."""
        found = list(full)
        if self.is_whole:
            return tuple(found)
        for dim, ranges in enumerate(self._ranges(full)):
            found[dim] = sum(end - first for first, end in ranges)
        return tuple(found)

    def slices(self, full: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], slice]]:
        """Pairs of a slice of the tensor and the rows of the part that it fills."""
        rows, *columns = self._ranges(full)
        behind = tuple(slice(*each[0]) for each in columns)
        start = 0
        for first, end in rows:
            yield (slice(first, end), *behind), slice(start, start + end - first)
            start += end - first

    def _ranges(self, full: Sequence[int]) -> list[tuple[Range, ...]]:
        given = [self.rows, None if self.columns is None else (self.columns,)]
        found: list[tuple[Range, ...]] = []
        for dim, ranges in enumerate(given[: 1 if self.columns is None else 2]):
            if len(full) <= dim:
                raise ValueError(f"a tensor of shape {list(full)} has no dimension {dim} to cut")
            found.append(((0, full[dim]),) if ranges is None else ranges)
            if not all(0 <= first <= end <= full[dim] for first, end in found[-1]):
                raise ValueError(f"{ranges} is outside of dimension {dim} of {list(full)}")
        return found


WHOLE = Cut()


def whole_blocks(size: int) -> int:
    """Returns the size of an expert's dimension in memory, where it is padded with zeros."""
    return -(-size // BLOCK) * BLOCK


def head_lanes(num_heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns the borders of `o_proj`'s lanes as columns of K.

    A unit is a head; for heads that fill no blocks of 32 columns it is the fewest heads that do, if
    the columns of all heads do.
    """
    width, unit = num_heads * head_dim, lcm(head_dim, BLOCK)
    unit = head_dim if width % unit else unit
    return tuple(each * unit for each in lane_borders(width // unit))


def column_lanes(width: int) -> tuple[int, ...]:
    """Returns the borders of `down_proj`'s lanes as columns of K; the last block may be partial."""
    return tuple(min(each * BLOCK, width) for each in lane_borders(-(-width // BLOCK)))


def rank_range(borders: Sequence[int], rank: int, num_ranks: int) -> Range:
    """Returns a rank's range of something that is cut into lanes. Raises ValueError."""
    first, end = rank_lanes(rank, num_ranks)
    return borders[first], borders[end]


def kv_head_range(heads: Range, num_heads: int, num_kv_heads: int) -> Range:
    """Returns the KV heads that a rank's query heads read; ranks may share one.

    Raises ValueError unless each of them serves equally many of the rank's heads.
    """
    group = num_heads // num_kv_heads
    first, end = heads[0] // group, -(-heads[1] // group)
    is_even = end - first == 1 or (heads[0] % group == 0 and heads[1] % group == 0)
    if not is_even:
        raise ValueError(
            f"heads {heads[0]} to {heads[1]} of {num_heads} cannot be one rank's: they use "
            f"unequal parts of groups of {group} heads to a KV head"
        )
    return (first, end) if heads[1] > heads[0] else (first, first)


def qkv_cut(heads: Range, kv_heads: Range, num_heads: int, num_kv_heads: int, dim: int) -> Cut:
    """Returns a rank's rows of Q, K and V, fused in this order."""
    keys, values = num_heads, num_heads + num_kv_heads
    starts = ((0, heads), (keys, kv_heads), (values, kv_heads))
    return Cut(rows=tuple(((at + low) * dim, (at + high) * dim) for at, (low, high) in starts))


def gate_up_cut(columns: Range, inner: int) -> Cut:
    """Returns a rank's rows of gate and up, fused in this order; `columns` are those
    of `down_proj`.
    """
    first, end = columns
    return Cut(rows=((first, end), (inner + first, inner + end)))
