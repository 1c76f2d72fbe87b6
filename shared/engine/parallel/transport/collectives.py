"""Collectives over torch.distributed: Gloo between CPUs, NCCL between GPUs.

The only file that imports torch.distributed. Its all-reduce is never used: its order of additions
changes with the number of ranks and the length. Tensors travel as bytes, so that every dtype is
exact over both.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh_shape import WAIT_S, MeshShape, RankLost
from shared.engine.parallel.rank_mesh import RankMesh

Backend = Literal["gloo", "nccl"]


class DistributedTransport:
    """A `Transport` over torch.distributed. Ranks meet at `rendezvous`: `file:///PATH` or
    `tcp://HOST:PORT`.

    The limit is given to torch explicitly: its own is 30 minutes. A killed peer raises at once over
    Gloo; a stopped one only after the limit. With NCCL, `device` is the rank's own GPU.
    """

    def __init__(
        self,
        rendezvous: str,
        shape: MeshShape,
        rank: int,
        *,
        backend: Backend = "gloo",
        device: torch.device | None = None,
        limit_s: float = WAIT_S,
    ) -> None:
        self.shape, self.rank = shape, rank
        self.device = device or torch.device("cpu")
        if (backend == "nccl") != (self.device.type == "cuda"):
            raise ValueError(f"{backend} cannot serve tensors on {self.device}")
        limit = timedelta(seconds=limit_s)
        with _failures(None):
            dist.init_process_group(
                backend,
                rendezvous,
                rank=rank,
                world_size=shape.num_ranks,
                timeout=limit,
                # NCCL connects all ranks now: two that swap first would wait for the others
                device_id=device if backend == "nccl" else None,
            )
            # Each rank must take part in creating every group, in one order.
            ranks = [list(shape.stage_ranks(stage)) for stage in range(shape.pp)]
            groups = [dist.new_group(each, timeout=limit) for each in ranks]
        self._stage_group = groups[shape.place(rank)[0]]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.shape.tp)]
        outs = [_bytes_of(each) for each in found]
        with _failures(None):
            dist.all_gather(outs, _bytes_of(x), group=self._stage_group)
        return found

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        calls = []
        if x.numel():
            calls.append(dist.P2POp(dist.isend, _bytes_of(x), rank))
        if out.numel():
            calls.append(dist.P2POp(dist.irecv, _bytes_of(out), rank))
        with _failures(rank):
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()

    def send(self, x: Tensor, rank: int) -> None:
        with _failures(rank):
            dist.send(_bytes_of(x), rank)

    def recv(self, out: Tensor, rank: int) -> None:
        with _failures(rank):
            dist.recv(_bytes_of(out), rank)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a peer may have ended before
            dist.destroy_process_group()


class GlooTransport:
    """A `Transport` over Gloo between processes of several hosts, without torch's global group.

    Ranks find each other's addresses in `store`; the others reach this host at the address `host`.
    Several such groups may live in one process.
    """

    def __init__(
        self, store: dist.Store, shape: MeshShape, rank: int, host: str, limit_s: float = WAIT_S
    ) -> None:
        self.shape, self.rank, self.device = shape, rank, torch.device("cpu")
        self._ranks = shape.stage_ranks(shape.place(rank)[0])
        with _failures(None):
            self._all = _gloo_group(store, "all", rank, range(shape.num_ranks), host, limit_s)
            self._stage = self._all
            if shape.pp > 1 and shape.tp > 1:
                name = f"stage{self._ranks[0]}"
                self._stage = _gloo_group(store, name, rank, self._ranks, host, limit_s)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in self._ranks]
        with _failures(None):
            self._stage.allgather([[_bytes_of(each) for each in found]], [_bytes_of(x)]).wait()
        return found

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        with _failures(rank):
            works = []
            if x.numel():
                works.append(self._all.send([_bytes_of(x)], rank, 0))
            if out.numel():
                works.append(self._all.recv([_bytes_of(out)], rank, 0))
            for work in works:
                work.wait()

    def send(self, x: Tensor, rank: int) -> None:
        with _failures(rank):
            self._all.send([_bytes_of(x)], rank, 0).wait()

    def recv(self, out: Tensor, rank: int) -> None:
        with _failures(rank):
            self._all.recv([_bytes_of(out)], rank, 0).wait()

    def close(self) -> None:
        """Connections end with the groups."""
        del self._all, self._stage


def _gloo_group(
    store: dist.Store, name: str, rank: int, ranks: Sequence[int], host: str, limit_s: float
) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the calls below
    options = gloo._Options()
    options._timeout = timedelta(seconds=limit_s)
    options._devices = [gloo.create_device(hostname=host)]
    place = ranks.index(rank), len(ranks)
    return gloo(dist.PrefixStore(name, store), *place, options)


def serve_store(host: str) -> tuple[dist.Store, int]:
    """Serves a store where the ranks of a group find each other's addresses. Returns it, and its
    port on this host.

    It listens on this address alone; torch would listen on all. Raises OSError.
    """
    server = socket.create_server((host, 0))
    port = server.getsockname()[1]
    options: Any = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": server.detach(),
    }
    return dist.TCPStore(host, port, **options), port


def open_store(host: str, port: int, key: str, limit_s: float) -> dist.Store:
    """Opens a store. No address is found without the group's `key`. Raises RankLost."""
    with _failures(None):
        limit = timedelta(seconds=limit_s)
        return dist.PrefixStore(key, dist.TCPStore(host, port, is_master=False, timeout=limit))


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


@contextlib.contextmanager
def _failures(rank: int | None) -> Iterator[None]:
    """torch reports a lost peer as RuntimeError, without its rank where several take part."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(rank, str(error).splitlines()[0]) from error


def distributed_mesh(
    rendezvous: str,
    shape: MeshShape,
    rank: int,
    *,
    exchange: Exchange = "fp32",
    backend: Backend = "gloo",
    device: torch.device | None = None,
    limit_s: float = WAIT_S,
) -> RankMesh:
    transport = DistributedTransport(
        rendezvous, shape, rank, backend=backend, device=device, limit_s=limit_s
    )
    return RankMesh(transport, exchange)
