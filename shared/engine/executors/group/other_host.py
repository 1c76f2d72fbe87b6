"""The ranks of a worker on a host that is not the leader's. No torch: the ranks import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from shared.engine.executors.group.messages import RankSetup
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.host_ranks import HostRanks
from shared.engine.parallel.processes.join import HostConnections, open_connections
from shared.engine.parallel.processes.rank_messages import StartRank

WORK = ("kv", "masks")  # connections that ranks use themselves


def run_host_ranks(
    address: tuple[str, int],
    key: bytes,
    name: str,
    ranks: range,
    shape: MeshShape,
    *,
    model_dir: Path,
    num_threads: int,
    on_turn: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Runs the ranks of one host. `address` and `key` are the leader's; `model_dir` is this host's
    copy of the checkpoint. `on_turn` is called several times a second. Always raises GroupLost,
    which says why the group has ended.
    """
    host = open_connections(address, key, name, ranks, shape)
    own_address = host.steps.getsockname()[0]
    threads = max(1, (num_threads or len(os.sched_getaffinity(0))) // len(ranks))

    def prepare(start: StartRank) -> StartRank:
        setup = msgspec.msgpack.decode(start.config, type=RankSetup)
        own = msgspec.structs.replace(
            setup,
            model_dir=str(model_dir.resolve()),
            num_threads=threads,
            kv=tuple(_descriptor(host, "kv", rank) for rank in range(shape.num_ranks)),
            masks=_descriptor(host, "masks", shape.answering_rank),
            data_plane_host=own_address,
        )
        config = msgspec.msgpack.encode(own)
        return msgspec.structs.replace(start, config=config, address=own_address)

    inherited = (host.sockets[role].fileno() for role in host.sockets if role[0] in WORK)
    HostRanks(
        host,
        shape,
        prepare,
        on_turn=on_turn,
        inherited=tuple(inherited),
        num_threads=threads,
        environment={"NUMBA_NUM_THREADS": str(threads)},
    ).run()


def _descriptor(host: HostConnections, kind: str, rank: int) -> int:
    connection = host.sockets.get((kind, rank))
    return -1 if connection is None else connection.fileno()
