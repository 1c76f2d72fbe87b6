"""A second host of a worker, as a process of this machine: HOST PORT KEY FIRST NUM TP PP FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from shared.engine.executors.group.other_host import run_host_ranks
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.watchdog import GroupLost


def main(host: str, port: str, key: str, first: str, num: str, tp: str, pp: str, to: str) -> None:
    ranks = range(int(first), int(first) + int(num))
    shape = MeshShape(int(tp), int(pp))
    place = (host, int(port)), bytes.fromhex(key), "other", ranks, shape
    try:
        run_host_ranks(*place, model_dir=Path(to), num_threads=2)
    except GroupLost as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
