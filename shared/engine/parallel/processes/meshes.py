"""The mesh that a rank process was started with."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.link_measure import measure_links
from shared.engine.parallel.links import RankLink
from shared.engine.parallel.mesh import LocalMesh, Mesh
from shared.engine.parallel.processes.rank_messages import StartRank
from shared.engine.parallel.rank_mesh import RankMesh, Transport
from shared.engine.parallel.transport.collectives import GlooTransport, distributed_mesh, open_store
from shared.engine.parallel.transport.host_transport import HostTransport
from shared.engine.parallel.transport.shared_memory_mesh import (
    SharedMemoryTransport,
    shared_memory_mesh,
)


def connect(start: StartRank, transport: str, exchange: Exchange = "fp32") -> Mesh:
    """Raises ValueError for an unknown transport, RankLost if the ranks do not meet."""
    shape = start.shape
    if shape.num_ranks == 1:
        return LocalMesh(exchange)
    match transport:
        case "shared_memory":
            place = start.mesh_memory, shape, start.rank
            return shared_memory_mesh(*place, exchange, start.limit_s)
        case "hosts":
            return RankMesh(_between_hosts(start), exchange)
        case "gloo":
            return distributed_mesh(
                start.rendezvous, shape, start.rank, exchange=exchange, limit_s=start.limit_s
            )
        case "nccl":
            device = torch.device("cuda", start.rank)
            torch.cuda.set_device(device)
            return distributed_mesh(
                start.rendezvous,
                shape,
                start.rank,
                exchange=exchange,
                backend="nccl",
                device=device,
                limit_s=start.limit_s,
            )
    raise ValueError(f"no transport {transport!r}: shared_memory, gloo, nccl or hosts")


def _between_hosts(start: StartRank) -> Transport:
    """Opens the transport between hosts; the rendezvous is store://HOST:PORT/KEY."""
    parts = urlsplit(start.rendezvous)
    if parts.scheme != "store" or parts.hostname is None or parts.port is None:
        raise ValueError(f"rendezvous {start.rendezvous!r} is not store://HOST:PORT/KEY")
    store = open_store(parts.hostname, parts.port, parts.path, start.limit_s)
    place = start.shape, start.rank
    between = GlooTransport(store, *place, start.address, start.limit_s)
    inside = SharedMemoryTransport(start.mesh_memory, *place, start.limit_s)
    return HostTransport(inside, between, start.hosts)


def measured(mesh: Mesh, hosts: Sequence[str]) -> tuple[RankLink, ...]:
    """Returns the links that this rank measured. Raises RankLost."""
    return measure_links(mesh.transport, hosts) if isinstance(mesh, RankMesh) else ()
