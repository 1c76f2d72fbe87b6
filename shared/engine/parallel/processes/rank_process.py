"""A rank: loads its part, says that it is ready, computes each step of the leader's ring.

python -m shared.engine.parallel.processes.rank_process CONTROL_FD

It ends with its leader: the kernel kills it when the leader dies, and it exits when the control
socket closes. Whatever it computes is named by the leader as `module:name`: no torch is imported
here, so each kind of work brings what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.links import RankLink
from shared.engine.parallel.processes.rank_messages import (
    MAX_MESSAGE_BYTES,
    Failed,
    Go,
    RankIdentity,
    Ready,
    StartRank,
    ToLeader,
    decode_to_rank,
    encode,
)
from shared.engine.parallel.processes.records import Record
from shared.engine.parallel.processes.ring import RingReader, RingWriter
from shared.telemetry.line_writer import replace_standard_streams

if TYPE_CHECKING:
    from shared.engine.parallel.mesh import Mesh

_PR_SET_PDEATHSIG = 1
MAX_LINE = 2000


class RankWork(Protocol):
    """The computation of a rank. Its `identity` is compared with the other ranks' before the first
    step.
    """

    identity: RankIdentity

    def serve(self, ring: StepRing) -> None:
        """Answers all steps, in their order. Ends with an exception only, which ends the group."""


class StepRing:
    """The leader's steps, and this rank's answers. Only those of the answering rank are sent."""

    def __init__(self, start: StartRank) -> None:
        self._steps = RingReader(start.steps, start.step_reader)
        self._answers: RingWriter | None = None
        if start.rank == start.shape.answering_rank:
            self._answers = RingWriter(start.answers, start.limit_s)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `take` may find a step."""
        return self._steps.fileno()

    def read(self) -> Record:
        """Waits for the next step."""
        while (record := self._steps.read(None)) is None:
            pass
        return record

    def take(self) -> Record | None:
        """Returns the next step, if one has come."""
        return self._steps.take()

    def answer(self, step: int, data: bytes) -> None:
        if self._answers is not None:
            self._answers.write(Record(step, data))


class OneByOne(ABC):
    """Work that answers a step before it takes the next one."""

    @abstractmethod
    def run(self, step: int, plan: bytes) -> bytes:
        """Returns the answer of a step. Whatever it raises ends the group."""

    def serve(self, ring: StepRing) -> None:
        while True:
            record = ring.read()
            ring.answer(record.step, self.run(record.step, record.data))


@dataclass(frozen=True)
class RankContext:
    """The context from which `entry(context) -> RankWork` creates a rank's work."""

    start: StartRank
    links: list[RankLink] = field(default_factory=list)  # measured by `mesh`
    send: Callable[[ToLeader], None] = lambda message: None

    @property
    def rank(self) -> int:
        return self.start.rank

    @property
    def config(self) -> bytes:
        return self.start.config

    def mesh(self, transport: str | None = None, exchange: Exchange = "fp32") -> Mesh:
        """Returns the rank's group; `transport` other than that of the group is for tests."""
        from shared.engine.parallel.processes import meshes  # torch, which not every work needs

        mesh = meshes.connect(self.start, transport or self.start.transport, exchange)
        self.links.extend(meshes.measured(mesh, self.start.hosts))
        return mesh


Entry = Callable[[RankContext], RankWork]


def die_with(leader_pid: int) -> None:
    """The kernel kills this process when the thread that spawned it ends. Linux alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader_pid:  # it died before the call
        os._exit(1)


def load_entry(name: str) -> Entry:
    """Raises ValueError."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no work {name!r}: {error}") from error
    return found


class _Control:
    """The control socket. Its end ends the process, whatever the process is doing."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_go = threading.Event()

    def receive_start(self) -> StartRank:
        message = decode_to_rank(self._receive())
        if not isinstance(message, StartRank):
            raise ValueError(f"{type(message).__name__} came before StartRank")
        threading.Thread(target=self._watch, daemon=True).start()
        return message

    def _watch(self) -> None:
        while True:
            if isinstance(decode_to_rank(self._receive()), Go):
                self._is_go.set()

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        return data

    def wait_for_go(self) -> None:
        self._is_go.wait()

    def send(self, message: ToLeader) -> None:
        self._socket.send(encode(message))


def main(control_fd: int) -> None:
    replace_standard_streams()
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to all processes: the leader drains first
        signal.signal(each, signal.SIG_IGN)
    control = _Control(socket.socket(fileno=control_fd))
    start = control.receive_start()
    die_with(start.leader_pid)
    try:
        context = RankContext(start, send=control.send)
        work = load_entry(start.entry)(context)
        control.send(Ready(work.identity, tuple(context.links)))
        control.wait_for_go()
        work.serve(StepRing(start))
    except BaseException as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}".splitlines()[0][:MAX_LINE]
        with contextlib.suppress(OSError):
            control.send(Failed(line))
        sys.stderr.flush()
        os._exit(1)  # threads of libraries must not delay the end of the group


if __name__ == "__main__":
    main(int(sys.argv[1]))
