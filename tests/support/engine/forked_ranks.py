"""Rank processes by fork from the template of clusters: the imports of one take 3 s of CPU.

`tests/shared/engine/parallel/processes` starts ranks as the engine does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.cluster.process_template import RANK, ForkedProcess, template

MODULES = (
    "shared.engine.executors.group.rank_work",
    "shared.engine.parallel.processes.meshes",
    "shared.engine.parallel.processes.rank_process",
)
MAX_FDS = 64


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Groups that this process starts have forked ranks."""
    spawn = import_module("shared.engine.parallel.processes.spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "run_rank", _fork_rank)
        yield


def _fork_rank(control: int, fds: Sequence[int], environ: Mapping[str, str]) -> ForkedProcess:
    errors = Path(f"/proc/{os.getpid()}/fd/2")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/fds"
        listener.bind(path)
        listener.listen(1)
        arguments = (RANK, path, str(control), *map(str, fds))
        process = template().start(arguments, environ, errors)
        connection, _ = listener.accept()
        with connection:
            socket.send_fds(connection, [b"f"], [*fds])
            connection.recv(1)  # it has them
    return process


# ── in the template ──────────────────────────────────────────────────────────────────────────────


def import_rank() -> None:
    for each in MODULES:
        import_module(each)


def become_rank(arguments: Sequence[str]) -> None:
    path, control, *numbers = arguments
    _receive_fds(path, [*map(int, numbers)])
    import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank_process = import_module("shared.engine.parallel.processes.rank_process")
    # its parent is the template; it ends with its control socket
    rank_process.die_with = lambda leader_pid: None
    rank_process.main(int(control))


def _receive_fds(path: str, numbers: Sequence[int]) -> None:
    """Opens the leader's descriptors by the same numbers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        _, received, _, _ = socket.recv_fds(connection, 1, MAX_FDS)
        above = max(numbers) + 1
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
        for each in received:
            os.close(each)
        connection.send(b"r")
    for source, target in zip(moved, numbers, strict=True):
        os.dup2(source, target)
        os.close(source)
