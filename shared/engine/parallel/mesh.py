"""The seam between a rank and the other ranks of its group.

A model is cut into `pp` stages of contiguous layers; each stage is held by `tp` ranks. Nothing
here sums in an order that depends on the number of ranks: there is no all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.parallel.lane_sums import Exchange, check_lanes, sum_nodes

TP_SIZES = (1, 2, 4, 8)
WAIT_S = 30.0  # the longest that a rank waits for another


class RankLost(RuntimeError):
    """A rank does not answer, or its connection failed. `rank` is None where it is unknown."""

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(f"{'a rank' if rank is None else f'rank {rank}'} is lost: {reason}")
        self.rank = rank


@dataclass(frozen=True)
class MeshShape:
    """`tp` ranks for each of `pp` stages. Rank = stage * tp + tp_rank. Raises ValueError."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp not in TP_SIZES:
            raise ValueError(f"tensor parallel size {self.tp}: it must be 1, 2, 4 or 8")
        if self.pp < 1:
            raise ValueError(f"pipeline parallel size {self.pp}: it must be at least 1")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def answering_rank(self) -> int:
        """The first rank of the last stage, which has the logits."""
        return (self.pp - 1) * self.tp

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, tp_rank) of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in [0, {self.num_ranks})")
        return divmod(rank, self.tp)

    def rank_of(self, stage: int, tp_rank: int) -> int:
        if not (0 <= stage < self.pp and 0 <= tp_rank < self.tp):
            raise ValueError(f"stage {stage}, tensor rank {tp_rank} is not in {self}")
        return stage * self.tp + tp_rank

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks of one stage, in the order of their lanes."""
        return tuple(self.rank_of(stage, tp_rank) for tp_rank in range(self.tp))


class Mesh(Protocol):
    """What a rank asks of its group. All ranks of a stage make the same calls in one order.

    A wait that takes longer than the mesh's limit raises RankLost.
    """

    shape: MeshShape
    rank: int

    def add(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        """FP32 partial sums of this rank's lanes [8 / tp, ...] -> their sum over all eight lanes
        [...], rounded once to `dtype`. FP32 exchange also takes sums of aligned lanes, [2^k, ...].
        """

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The ranks' parts, joined along `dim`. `sizes`: of each rank's part, if they differ."""

    def best(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each rank's best value and its id, [rows] -> the best of all ranks, [rows].

        Of equal values the lowest id is best; NaN is above all numbers.
        """

    def send(self, x: Tensor) -> None:
        """Sends to this rank's place in the next stage, which receives in the same order."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Receives from this rank's place in the previous stage."""

    def close(self) -> None: ...


def best_of(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[ranks, rows] each -> the maximum and its id, [rows]; ties to the lowest id."""
    maximum = values.amax(dim=0)
    is_best = (values == maximum) | (values.isnan() & maximum.isnan())
    none = torch.iinfo(ids.dtype).max
    return maximum, ids.masked_fill(~is_best, none).amin(dim=0)


class LocalMesh:
    """One rank alone: the same sums without any exchange."""

    def __init__(self, exchange: Exchange = "fp32") -> None:
        self.shape, self.rank = MeshShape(), 0
        self._exchange: Exchange = exchange

    def add(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        check_lanes(lanes, self.shape.tp, self._exchange)
        return sum_nodes(lanes.unbind(), self._exchange, is_root=True).to(dtype)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def best(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return values, ids

    def send(self, x: Tensor) -> None:
        raise ValueError("one rank alone has no next stage")

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise ValueError("one rank alone has no previous stage")

    def close(self) -> None:
        """Nothing to release."""
