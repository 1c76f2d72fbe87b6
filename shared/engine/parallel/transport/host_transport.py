"""Collectives between ranks of several hosts: shared memory inside a host, Gloo between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.parallel.rank_mesh import Transport


class HostTransport:
    """A `Transport` that uses shared memory on one host. `hosts` has each rank's host.

    A stage gathers in shared memory if all its ranks are on one host; two ranks of one host always
    exchange there.
    """

    def __init__(self, inside: Transport, between: Transport, hosts: Sequence[str]) -> None:
        self.shape, self.rank, self.device = inside.shape, inside.rank, torch.device("cpu")
        self._inside, self._between = inside, between
        own = hosts[self.rank]
        stage = self.shape.stage_ranks(self.shape.place(self.rank)[0])
        self._is_inside = [host == own for host in hosts]
        self._gathers = inside if all(self._is_inside[rank] for rank in stage) else between

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._gathers.all_gather(x)

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        self._with(rank).swap(x, rank, out)

    def send(self, x: Tensor, rank: int) -> None:
        self._with(rank).send(x, rank)

    def recv(self, out: Tensor, rank: int) -> None:
        self._with(rank).recv(out, rank)

    def _with(self, rank: int) -> Transport:
        return self._inside if self._is_inside[rank] else self._between

    def close(self) -> None:
        self._inside.close()
        self._between.close()
