"""The leader's side of a group of rank processes: starts them, sends steps, receives answers.

The group lives and dies as one. See rank_process.py for the ranks, watchdog.py for the end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname

from shared.engine.parallel.mesh_memory import create_mesh_memory
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.planning.links import RankLink
from shared.engine.parallel.processes.rank_messages import (
    Go,
    RankIdentity,
    Ready,
    Start,
    difference,
    encode,
)
from shared.engine.parallel.processes.records import Record
from shared.engine.parallel.processes.ring import RingFiles, RingReader, RingWriter, create_ring
from shared.engine.parallel.processes.watchdog import (
    TICK_S,
    GroupLost,
    RankHandle,
    StoppedRanks,
    Watchdog,
    ended,
    failure_of,
)

ROOT = Path(__file__).resolve().parents[4]
STOP_S = 2.0  # for ranks to end by themselves


@dataclass(frozen=True)
class GroupSpec:
    """What a group computes, and how.

    `entry`: `module:name` of a callable, RankContext -> RankWork. `transport`: shared_memory, gloo
    or nccl. `limit_s`: the longest wait of a rank for another one; `ready_s`: for loading.
    """

    shape: MeshShape
    entry: str
    config: bytes = b""
    transport: str = "shared_memory"
    num_threads: int = 1
    inherited: tuple[int, ...] = ()  # descriptors of the work's own, open in every rank
    limit_s: float = 30.0
    ready_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of each rank."""
        return (gethostname(),) * self.shape.num_ranks


class RankGroup:
    """Ranks that are ready. One thread uses it, except `fileno`, which any event loop may watch.

    The thread that starts a group must outlive it: its end kills the ranks.
    """

    def __init__(
        self,
        handles: list[RankHandle],
        files: _GroupFiles,
        spec: GroupSpec,
        links: tuple[RankLink, ...],
    ) -> None:
        self.links = links  # that the ranks measured as they joined
        self._handles = handles
        self._files = files
        self._steps = RingWriter(files.steps, spec.limit_s)
        self._answers = RingReader(files.answers, 0)
        self._num_submitted = 0
        self._watchdog = Watchdog(handles, self._wake)

    @classmethod
    def start(cls, spec: GroupSpec) -> RankGroup:
        """Returns once all ranks are loaded and alike. Raises GroupLost, ValueError."""
        files = _GroupFiles.create(spec)
        handles: list[RankHandle] = []
        try:
            for rank in range(spec.shape.num_ranks):
                handles.append(_spawn(spec, files, rank))
            links = _shake_hands(handles, spec.ready_s)
        except BaseException:
            for each in handles:
                each.close()
            files.close()
            raise
        return cls(handles, files, spec, links)

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._handles]

    @property
    def loss(self) -> str | None:
        """Why the group is lost; None while it is not."""
        return self._watchdog.reason

    def fileno(self) -> int:
        """Readable when `take` has an answer, or the group is lost."""
        return self._answers.fileno()

    def submit(self, plan: bytes, budget_s: float) -> int:
        """The number of the step. Raises GroupLost; ValueError for a plan larger than the ring."""
        self._check()
        step = self._num_submitted
        self._steps.write(Record(step, plan))
        self._num_submitted += 1
        self._watchdog.expect(step, budget_s)
        return step

    def take(self, limit_s: float | None = 0.0) -> Record | None:
        """The next answer, in order of steps; None after the limit. Raises GroupLost."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while (answer := self._answers.take()) is None:
            self._check()
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return None
            self._answers.wait(remaining_s)
        self._watchdog.answered(answer.step)
        return answer

    def _check(self) -> None:
        if self._watchdog.reason is not None:
            raise GroupLost(self._watchdog.reason)

    def _wake(self) -> None:
        os.eventfd_write(self._answers.fileno(), 1)

    def close(self) -> None:
        """Ranks end as their control sockets close; those that do not are killed."""
        self._watchdog.close()
        for each in self._handles:
            with contextlib.suppress(OSError):  # the rank has ended
                each.control.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + STOP_S
        for each in self._handles:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, deadline - time.monotonic()))
            each.close()
        self._steps.close()
        self._answers.close()
        self._files.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _GroupFiles:
    """What the processes of a group share."""

    steps: RingFiles
    answers: RingFiles
    mesh_memory: int
    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def create(cls, spec: GroupSpec) -> _GroupFiles:
        return cls(
            create_ring(spec.shape.num_ranks),
            create_ring(1),
            create_mesh_memory(spec.shape),
            tempfile.TemporaryDirectory(prefix="hearth-group-"),
        )

    def start(self, spec: GroupSpec, rank: int) -> Start:
        return Start(
            rank=rank,
            tp=spec.shape.tp,
            pp=spec.shape.pp,
            entry=spec.entry,
            config=spec.config,
            leader_pid=os.getpid(),
            transport=spec.transport,
            mesh_memory=self.mesh_memory,
            rendezvous=f"file://{self.folder.name}/rendezvous",
            limit_s=spec.limit_s,
            steps=self.steps,
            answers=self.answers,
            hosts=spec.hosts,
        )

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self.steps.fds, *self.answers.fds, self.mesh_memory)

    def close(self) -> None:
        self.steps.close()
        self.answers.close()
        os.close(self.mesh_memory)
        self.folder.cleanup()


def _spawn(spec: GroupSpec, files: _GroupFiles, rank: int) -> RankHandle:
    first = encode(files.start(spec, rank))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "shared.engine.parallel.processes.rank_process",
                str(theirs.fileno()),
            ],
            pass_fds=(*files.fds, *spec.inherited, theirs.fileno()),
            env={**os.environ, **_environment(spec)},
            stdin=subprocess.DEVNULL,
        )
    handle = RankHandle(rank, process, os.pidfd_open(process.pid), ours)
    with contextlib.suppress(OSError):  # it has ended already: the handshake says why
        ours.send(first)
    return handle


def _environment(spec: GroupSpec) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Ranks wait for each other: threads that spin would take the others' processors.
    defaults = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.num_threads)}
    return {**defaults, "OMP_WAIT_POLICY": "passive", **spec.environment}


def _shake_hands(handles: list[RankHandle], ready_s: float) -> tuple[RankLink, ...]:
    """Returns the links that ranks measured. Raises GroupLost, which names the rank that ended, is
    stopped or late, or differs.
    """
    found: dict[int, RankIdentity] = {}
    links: list[RankLink] = []
    stopped = StoppedRanks()
    deadline = time.monotonic() + ready_s
    while missing := [each for each in handles if each.rank not in found]:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise GroupLost(f"rank {missing[0].rank} is not ready after {ready_s:g} s")
        if (line := stopped.check(handles)) is not None:
            raise GroupLost(line)
        for each in ended(handles, min(remaining_s, TICK_S)):
            message = each.receive() if each.rank not in found else None
            if isinstance(message, Ready):
                found[each.rank] = message.identity
                links += message.links
            elif message is not None:
                raise GroupLost(f"rank {each.rank} failed: {message.line}")
            elif (reason := failure_of([each])) is not None:
                raise GroupLost(reason)
    if (line := difference([found[each.rank] for each in handles])) is not None:
        raise GroupLost(line)
    for each in handles:
        each.control.send(encode(Go()))
    return tuple(links)
