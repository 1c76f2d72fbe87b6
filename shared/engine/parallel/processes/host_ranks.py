"""The ranks of one host whose leader is on another one: starts them and relays what they say.

    leader ══ steps, answers ══▶ this process ── rings ──▶ ranks
           ══ control of each rank ══▶        ── control sockets ──▶

They live and die as one with the leader's group: this process ends when a connection does, and the
kernel kills the ranks with it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.frames import (
    ConnectionLost,
    FrameSocket,
    SocketReader,
    SocketWriter,
)
from shared.engine.parallel.processes.join import SEND_S, HostConnections
from shared.engine.parallel.processes.rank_messages import (
    Failed,
    GroupRejected,
    LoadingPhase,
    RankAlive,
    Ready,
    StartRank,
    StepExtended,
    decode_to_rank,
    encode,
)
from shared.engine.parallel.processes.record_sender import RecordSender
from shared.engine.parallel.processes.records import RingError
from shared.engine.parallel.processes.ring import RingFull, RingReader, RingWriter
from shared.engine.parallel.processes.spawn import HostFiles, rank_environment, spawn_rank
from shared.engine.parallel.processes.watchdog import GroupLost, RankHandle, StoppedRanks

POLL_S = 0.25


class HostRanks:
    """Runs the ranks of one host. `prepare` adds the host's own options and address to the start of
    a rank. `inherited` descriptors belong to the work, and are open in every rank. A step waits for
    a rank as long as at the leader: `StartRank.limit_s`. `on_turn` is called in each turn, of at
    most POLL_S without messages.
    """

    def __init__(
        self,
        host: HostConnections,
        shape: MeshShape,
        prepare: Callable[[StartRank], StartRank],
        *,
        on_turn: Callable[[], None] = lambda: None,
        inherited: tuple[int, ...] = (),
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._on_turn = on_turn
        self._prepare = prepare
        self._inherited = inherited
        self._environment = rank_environment(num_threads, environment or {})
        self._handles: dict[int, RankHandle] = {}
        self._controls = {
            rank: FrameSocket(host.sockets["control", rank], SEND_S) for rank in host.ranks
        }
        steps = self._connection = FrameSocket(host.steps, SEND_S)
        self._steps = SocketReader(steps)
        self._lost: list[Exception] = []  # errors that kept a record from its reader
        self._to_leader = RecordSender([SocketWriter(steps)], self._lost.append)
        self._files = HostFiles.create(host.ranks, shape)
        self._local_steps = RingWriter(self._files.steps, SEND_S)
        self._to_ranks = RecordSender([self._local_steps], self._lost.append)
        self._answers = RingReader(self._files.answers, 0)
        self._stopped = StoppedRanks()
        self._alive_at = 0.0

    def run(self) -> NoReturn:
        """Always raises GroupLost, which says why the group has ended; no rank runs then."""
        try:
            while True:
                self._on_turn()
                self._wait()
                self._relay()
        except (ConnectionLost, RingError, msgspec.DecodeError) as error:
            raise GroupLost(f"the leader has ended the group: {error}") from None
        finally:
            self._close()

    def _wait(self) -> None:
        poll = select.poll()
        sources = [self._connection.fileno(), self._answers.fileno()]
        sources += [each.fileno() for each in self._controls.values()]
        sources += [fd for each in self._handles.values() for fd in each.fds]
        for fd in sources:
            poll.register(fd, select.POLLIN)
        poll.poll(POLL_S * 1000)

    def _relay(self) -> None:
        """Forwards messages, control first: it says why the other connections end."""
        for rank, control in self._controls.items():
            while (data := control.take()) is not None:
                self._obey(rank, data)
        self._report_alive()
        while (step := self._steps.take()) is not None:
            self._to_ranks.send(step)
        while (answer := self._answers.take()) is not None:
            self._to_leader.send(answer)
        for each in self._handles.values():
            self._report(each)
        self._check_sent()
        if (line := self._stopped.check(list(self._handles.values()))) is not None:
            self._fail(min(self._handles), line)

    def _check_sent(self) -> None:
        """Ends the group if a record, of this turn or an earlier one, did not reach its readers."""
        if not self._lost:
            return
        error = self._lost[0]
        if isinstance(error, ConnectionLost):
            raise error
        reader = error.reader if isinstance(error, RingFull) else 0
        self._fail(self._files.ranks[reader], f"steps do not reach it: {error}")

    def _report_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= POLL_S:
            self._alive_at = now
            for control in self._controls.values():
                control.send(encode(RankAlive()))

    def _obey(self, rank: int, data: bytes) -> None:
        message = decode_to_rank(data)
        match message:
            case StartRank():
                self._local_steps.limit_s = message.limit_s
                start = self._prepare(message)
                handle = spawn_rank(start, self._files, self._inherited, self._environment)
                self._handles[rank] = handle
            case GroupRejected(line=line):
                raise GroupLost(line)
            case _:
                self._handles[rank].send(message)

    def _report(self, handle: RankHandle) -> None:
        """Forwards the rank's message, or how it ended."""
        message = handle.receive()
        if isinstance(message, LoadingPhase | Ready | StepExtended):
            self._controls[handle.rank].send(encode(message))
        elif isinstance(message, Failed):
            self._fail(handle.rank, message.line)
        elif handle.has_ended():
            self._fail(handle.rank, f"it ended: {handle.ending()}")

    def _fail(self, rank: int, line: str) -> None:
        self._controls[rank].send(encode(Failed(line)))
        raise GroupLost(f"rank {rank}: {line}")

    def _close(self) -> None:
        for each in self._handles.values():
            each.close()
        self._to_leader.close()
        for frames in (self._connection, *self._controls.values()):
            frames.shutdown()
            frames.close()
        self._to_ranks.close()
        self._local_steps.close()
        self._answers.close()
        self._files.close()
