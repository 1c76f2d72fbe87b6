"""The lanes in which a row-parallel GEMM sums over K, as its kernels take them.

    lane sum[l]  = Σ_{k in lane l} x[m, k] · weight[n, k]      in FP32
    product      = ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7)), rounded once

The lanes and their order are the same for every number of ranks; a rank holds a subtree of the
additions. An empty lane changes no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from torch import Tensor

from kernels.check_tensor import BadTensor


@dataclass(frozen=True, slots=True)
class SumLanes:
    """The lanes of a weight [N, K]. `borders` has the first column of each lane, and K. `alignment`
    divides the borders of all ranks: a kernel chooses its steps by it, so that they are the same
    for each rank.
    """

    borders: tuple[int, ...]
    alignment: int

    @staticmethod
    def of(borders: Sequence[int]) -> SumLanes:
        """Returns the lanes of a full weight. Raises ValueError unless their number is
        a power of two.
        """
        num = len(borders) - 1
        if num < 1 or num & (num - 1):
            raise ValueError(f"{num} lanes do not form a tree: a power of two does")
        return SumLanes(tuple(borders), gcd(*borders))

    def part(self, first: int, end: int) -> SumLanes:
        """Lanes [first, end) of the weight's, as those of its columns in them."""
        start = self.borders[first]
        borders = tuple(each - start for each in self.borders[first : end + 1])
        return SumLanes(borders, self.alignment)

    @property
    def num(self) -> int:
        return len(self.borders) - 1

    @property
    def width(self) -> int:
        return self.borders[-1]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.borders, self.borders[1:], strict=False))

    def check(self, width: int, num_sums: int) -> None:
        """Raises BadTensor unless the lanes cover `width` columns, and give so many sums."""
        if self.width != width:
            raise BadTensor(f"the lanes end at column {self.width}, not {width}")
        if num_sums < 1 or self.num % num_sums or num_sums & (num_sums - 1):
            raise BadTensor(f"{self.num} lanes do not give {num_sums} sums of subtrees")


def add_lanes(sums: Tensor, num_sums: int = 1) -> Tensor:
    """Sums of lanes [L, M, N] -> of `num_sums` subtrees [num_sums, M, N]."""
    while len(sums) > num_sums:
        sums = sums[::2] + sums[1::2]
    return sums
