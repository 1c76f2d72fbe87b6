"""Starts the rank processes of one host, and what they share."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.rank_messages import StartRank, encode
from shared.engine.parallel.processes.ring import RingFiles, create_ring
from shared.engine.parallel.processes.watchdog import RankHandle, RankProcess
from shared.engine.parallel.transport.mesh_memory import create_mesh_memory
from shared.lifecycle.child_process import engine_environ


@dataclass(frozen=True)
class HostFiles:
    """Files that the processes of a group share on one host, which runs `ranks`."""

    ranks: range
    steps: RingFiles
    answers: RingFiles
    mesh_memory: int
    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def create(cls, ranks: range, shape: MeshShape) -> HostFiles:
        return cls(
            ranks,
            create_ring(len(ranks)),
            create_ring(1),
            create_mesh_memory(shape),
            tempfile.TemporaryDirectory(prefix="hearth-group-"),
        )

    def start(self, start: StartRank) -> StartRank:
        """Adds this host's files to `start`. Ranks of one host meet in a file of it."""
        return replace(
            start,
            leader_pid=os.getpid(),
            mesh_memory=self.mesh_memory,
            rendezvous=start.rendezvous or f"file://{self.folder.name}/rendezvous",
            steps=self.steps,
            step_reader=start.rank - self.ranks.start,
            answers=self.answers,
        )

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self.steps.fds, *self.answers.fds, self.mesh_memory)

    def close(self) -> None:
        self.steps.close()
        self.answers.close()
        os.close(self.mesh_memory)
        self.folder.cleanup()


def spawn_rank(
    start: StartRank, files: HostFiles, inherited: Sequence[int], environment: Mapping[str, str]
) -> RankHandle:
    """Starts a rank process. `inherited` descriptors belong to the work, and are open
    in the rank.
    """
    first = encode(files.start(start))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = run_rank(
            theirs.fileno(),
            (*files.fds, *inherited, theirs.fileno()),
            {**engine_environ(os.environ), **environment},
        )
    handle = RankHandle(start.rank, process, os.pidfd_open(process.pid), ours)
    with contextlib.suppress(OSError):  # it has ended already: the handshake says why
        ours.send(first)
    return handle


def run_rank(control: int, fds: Sequence[int], environ: Mapping[str, str]) -> RankProcess:
    """Starts a process in which the descriptors `fds` are open; `control` is its control socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "shared.engine.parallel.processes.rank_process", str(control)],
        pass_fds=fds,
        env=environ,
        stdin=subprocess.DEVNULL,
    )


def rank_environment(num_threads: int, given: Mapping[str, str]) -> dict[str, str]:
    # Ranks wait for each other: threads that spin would take the others' processors.
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive", **given}
