"""The seam between a rank and the other ranks of its group.

A model is cut into `pp` stages of contiguous layers; each stage is held by `tp` ranks. Nothing
here sums in an order that depends on the number of ranks: there is no all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.parallel.lane_sums import check_lanes, sum_nodes
from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh_shape import MeshShape


class Mesh(Protocol):
    """A rank's connection to its group. All ranks of a stage make the same calls in one order.

    A wait that takes longer than the mesh's limit raises RankLost.
    """

    shape: MeshShape
    rank: int
    exchange: Exchange

    def add(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        """FP32 partial sums of this rank's lanes [8 / tp, ...] -> their sum over all eight lanes
        [...], rounded once to `dtype`. FP32 exchange also takes sums of aligned lanes, [2^k, ...].
        """

    def join(self, nodes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns all rows as `dtype`. `nodes` are in FP32: each row has values on one rank and
        EMPTY_LANE on the others.
        """

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """Returns the ranks' parts, joined along `dim`. `sizes` are those of the parts,
        if they differ.
        """

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
        self.exchange: Exchange = exchange

    def add(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        check_lanes(lanes, self.shape.tp, self.exchange)
        return sum_nodes(lanes.unbind(), self.exchange, is_root=True).to(dtype)

    def join(self, nodes: Tensor, dtype: torch.dtype) -> Tensor:
        return nodes.to(dtype)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def best(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return values, ids

    def send(self, x: Tensor) -> None:
        raise ValueError("one rank alone has no next stage")

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise ValueError("one rank alone has no previous stage")

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
