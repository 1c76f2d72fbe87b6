"""A second host of a group, as a process of this machine: python -m ... HOST PORT KEY NAME FIRST
NUM TP PP. It prints why the group ended.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.host_ranks import HostRanks
from shared.engine.parallel.processes.join import open_connections
from shared.engine.parallel.processes.rank_messages import StartRank
from shared.engine.parallel.processes.watchdog import GroupLost


def main(host: str, port: str, key: str, name: str, *numbers: str) -> None:
    first, num_ranks, tp, pp = map(int, numbers)
    shape, ranks = MeshShape(tp, pp), range(first, first + num_ranks)

    def prepare(start: StartRank) -> StartRank:
        return replace(start, address="127.0.0.1")

    try:
        joined = open_connections((host, int(port)), bytes.fromhex(key), name, ranks, shape)
        HostRanks(joined, shape, prepare).run()
    except GroupLost as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
