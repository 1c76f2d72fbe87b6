"""The hosts of a worker's last ranks, and the leader's channels to all ranks."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.executors.group.channel import Channel
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostConnections, HostListener
from shared.engine.parallel.transport.collectives import serve_store


@dataclass(frozen=True)
class JoinedHosts:
    """Connections to the other hosts of a group. All ranks find each other at `rendezvous`;
    `address` is that of the leader's host. Both are empty without other hosts. `store` serves the
    rendezvous as long as it is referenced.
    """

    hosts: tuple[HostConnections, ...] = ()
    rendezvous: str = ""
    address: str = ""
    store: object = None

    @classmethod
    def wait(cls, listener: HostListener | None, limit_s: float) -> JoinedHosts:
        """Returns once all other hosts have joined. Raises GroupLost after the limit."""
        if listener is None:
            return cls()
        hosts = tuple(listener.accept(limit_s))
        store, port = serve_store(listener.host)
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        rendezvous = f"store://{host}:{port}/{secrets.token_hex(16)}"
        return cls(hosts, rendezvous, listener.host, store)

    @property
    def transport(self) -> str:
        return "hosts" if self.hosts else "shared_memory"


@dataclass(frozen=True)
class RankChannels:
    """Channels from the leader to ranks: `kv` to the data plane of each rank, `masks` to the
    answering one. `rank_kv` and `rank_masks` are the descriptors that ranks of this host inherit;
    -1 stands for a rank of another host.
    """

    kv: tuple[socket.socket, ...]
    rank_kv: tuple[int, ...]
    masks: Channel
    rank_masks: int

    @classmethod
    def open(cls, shape: MeshShape, hosts: Sequence[HostConnections]) -> RankChannels:
        pairs = [_connection("kv", rank, hosts) for rank in range(shape.num_ranks)]
        masks, rank_masks = _connection("masks", shape.answering_rank, hosts)
        return cls(
            kv=tuple(ours for ours, _ in pairs),
            rank_kv=tuple(theirs for _, theirs in pairs),
            masks=Channel(masks),
            rank_masks=rank_masks,
        )

    @property
    def inherited(self) -> tuple[int, ...]:
        return tuple(each for each in (*self.rank_kv, self.rank_masks) if each >= 0)

    def close_inherited(self) -> None:
        """Closes the descriptors once ranks have them."""
        for each in self.inherited:
            os.close(each)


def _connection(
    kind: str, rank: int, hosts: Sequence[HostConnections]
) -> tuple[socket.socket, int]:
    """Returns the leader's end, and the descriptor that a rank of this host inherits."""
    for host in hosts:
        if rank in host.ranks:
            return host.sockets[kind, rank], -1
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ours, theirs.detach()
