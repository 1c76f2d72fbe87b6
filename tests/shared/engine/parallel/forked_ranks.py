"""Ranks as forks of the test process: real processes without the time to import torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from shared.engine.parallel.mesh import Mesh


def run_forked(
    num_ranks: int,
    connect: Callable[[int], Mesh],
    work: Callable[[Mesh], bytes],
    *,
    lost_rank: int = -1,
) -> list[bytes]:
    """What `work` returns at each rank. AssertionError if a rank raises, or one is killed that is
    not `lost_rank`.
    """
    pipes, pids = [os.pipe() for _ in range(num_ranks)], []
    for rank, (_, write_fd) in enumerate(pipes):
        if (pid := os.fork()) == 0:
            _run_child(connect, work, rank, write_fd)
        pids.append(pid)
        os.close(write_fd)
    found = []
    for read_fd, _ in pipes:
        with os.fdopen(read_fd, "rb") as pipe:
            found.append(pipe.read())
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(status for rank, status in enumerate(statuses) if rank != lost_rank)
    return found


def _run_child(
    connect: Callable[[int], Mesh], work: Callable[[Mesh], bytes], rank: int, write_fd: int
) -> None:
    try:
        mesh = connect(rank)
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(work(mesh))
        mesh.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
