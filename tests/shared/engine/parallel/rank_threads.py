"""Ranks as threads of one process: a transport for tests of up to eight ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import ALL_GATHER_BYTES, MeshShape, RankLost
from shared.engine.parallel.rank_mesh import RankMesh

T = TypeVar("T")
WAIT_S = 60.0  # a first run compiles


class ThreadTransport:
    def __init__(self, shape: MeshShape, rank: int, queues: dict[tuple[int, int], Queue]) -> None:
        self.shape, self.rank, self.device = shape, rank, torch.device("cpu")
        self._queues = queues
        self.num_sent_bytes = 0

    def all_gather(self, x: Tensor) -> list[Tensor]:
        ranks = self.shape.stage_ranks(self.shape.place(self.rank)[0])
        for rank in ranks:
            self.send(x, rank)
        found = [torch.empty_like(x) for _ in ranks]
        for rank, out in zip(ranks, found, strict=True):
            self.recv(out, rank)
        return found

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        self.send(x, rank)
        self.recv(out, rank)

    def send(self, x: Tensor, rank: int) -> None:
        self.num_sent_bytes += x.numel() * x.element_size() if rank != self.rank else 0
        self._queues[self.rank, rank].put(x.clone())

    def recv(self, out: Tensor, rank: int) -> None:
        try:
            x = self._queues[rank, self.rank].get(timeout=WAIT_S)
        except Empty:
            raise RankLost(rank, f"nothing received for {WAIT_S} s") from None
        assert x.dtype == out.dtype
        out.view(-1).copy_(x.view(-1))

    def close(self) -> None:
        """The queues end with the threads."""


def run_ranks(
    shape: MeshShape,
    work: Callable[[Mesh], T],
    exchange: Exchange = "fp32",
    all_gather_bytes: int = ALL_GATHER_BYTES,
) -> Sequence[T]:
    """The results of `work` at each rank."""
    ranks = range(shape.num_ranks)
    queues: dict[tuple[int, int], Queue] = {(a, b): Queue() for a in ranks for b in ranks}
    transports = [ThreadTransport(shape, rank, queues) for rank in ranks]
    return run_meshes([RankMesh(each, exchange, all_gather_bytes) for each in transports], work)


def run_meshes(meshes: Sequence[Mesh], work: Callable[[Mesh], T]) -> Sequence[T]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(work, meshes))
