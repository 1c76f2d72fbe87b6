"""The leader's side of a group of rank processes: starts them, sends steps, receives answers.

The group lives and dies as one. See rank_process.py for the ranks, watchdog.py for the end. Ranks
of other hosts, which have joined before, get the same records over a socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from socket import gethostname

from shared.engine.parallel.links import RankLink
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.frames import FrameSocket, SocketWriter
from shared.engine.parallel.processes.handshake import shake_hands
from shared.engine.parallel.processes.join import HostConnections
from shared.engine.parallel.processes.rank_messages import OnLoading, StartRank
from shared.engine.parallel.processes.record_sender import RecordSender, RecordWriter
from shared.engine.parallel.processes.records import Record
from shared.engine.parallel.processes.remote_rank import RemoteAnswers, RemoteHandle
from shared.engine.parallel.processes.ring import RingReader, RingWriter
from shared.engine.parallel.processes.spawn import HostFiles, rank_environment, spawn_rank
from shared.engine.parallel.processes.watchdog import GroupLost, Handle, RankHandle, Watchdog

STOP_S = 2.0  # time for ranks to end by themselves


@dataclass(frozen=True)
class GroupSpec:
    """The work of a group, and its limits.

    `entry` is `module:name` of a callable, RankContext -> RankWork. `transport` is shared_memory,
    gloo, nccl, or hosts (see HostTransport). A rank waits for another one at most `limit_s`, and
    for loading `ready_s`. `remote` are the hosts of the last ranks; all ranks meet at `rendezvous`,
    and `address` is this host's, if there are any.
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
    remote: tuple[HostConnections, ...] = ()
    rendezvous: str = ""
    address: str = ""
    silent_s: float = 3.0  # silence after which another host counts as stopped

    @property
    def local_ranks(self) -> range:
        return range(self.shape.num_ranks - sum(len(each.ranks) for each in self.remote))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names of the ranks."""
        local = (gethostname(),) * len(self.local_ranks)
        return local + tuple(each.name for each in self.remote for _ in each.ranks)

    def start(self, rank: int) -> StartRank:
        return StartRank(
            rank=rank,
            tp=self.shape.tp,
            pp=self.shape.pp,
            entry=self.entry,
            config=self.config,
            transport=self.transport,
            rendezvous=self.rendezvous,
            limit_s=self.limit_s,
            hosts=self.hosts,
            address=self.address,
        )


class RankGroup:
    """Ranks that are ready. One thread uses it, except `fileno`, which any event loop may watch.

    The thread that starts a group must outlive it: its end kills the ranks.
    """

    def __init__(
        self,
        handles: list[Handle],
        files: HostFiles,
        spec: GroupSpec,
        links: tuple[RankLink, ...],
    ) -> None:
        self.links = links  # links that the ranks measured as they joined
        self._handles = handles
        self._files = files
        self._local_steps = RingWriter(files.steps, spec.limit_s)
        self._answers = RingReader(files.answers, 0)
        self._num_submitted = 0
        self._watchdog = Watchdog(handles, self._wake, self._answers.has_record)
        self._remote = spec.remote
        self._remote_answers: RemoteAnswers | None = None
        writers: list[RecordWriter] = []  # other hosts first: their ranks get it later
        for host in spec.remote:
            steps = FrameSocket(host.steps, spec.limit_s)
            writers.append(SocketWriter(steps))
            if spec.shape.answering_rank in host.ranks:
                answers = RingWriter(files.answers, spec.limit_s)
                self._remote_answers = RemoteAnswers(steps, answers, self._watchdog.fail)
        self._steps = RecordSender([*writers, self._local_steps], self._lose_step)

    @classmethod
    def start(cls, spec: GroupSpec, on_loading: OnLoading = lambda phase: None) -> RankGroup:
        """Returns once all ranks are loaded and alike; `on_loading` gets what they do until then.
        Raises GroupLost, ValueError.
        """
        files = HostFiles.create(spec.local_ranks, spec.shape)
        environment = rank_environment(spec.num_threads, spec.environment)
        handles: list[Handle] = []
        try:
            for rank in spec.local_ranks:
                start = spec.start(rank)
                handles.append(spawn_rank(start, files, spec.inherited, environment))
            handles += _remote_handles(spec)
            links = shake_hands(handles, spec.ready_s, on_loading)
        except BaseException:
            for each in handles:
                each.close()
            files.close()
            for host in spec.remote:
                host.close()
            raise
        return cls(handles, files, spec, links)

    @property
    def pids(self) -> list[int]:
        """Process ids of this host's ranks."""
        return [each.process.pid for each in self._handles if isinstance(each, RankHandle)]

    @property
    def loss(self) -> str | None:
        """The reason that the group is lost; None while it is not."""
        return self._watchdog.reason

    def on_extended(self, handler: Callable[[], None]) -> None:
        """Calls `handler`, on another thread, when a rank extends the steps in flight."""
        self._watchdog.on_extended = handler

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `take` has an answer, or the group is lost."""
        return self._answers.fileno()

    def submit(self, plan: bytes, budget_s: float) -> int:
        """Returns the number of the step. Does not wait for ranks. Raises GroupLost."""
        self._check()
        step = self._num_submitted
        self._steps.send(Record(step, plan))
        self._num_submitted += 1
        self._watchdog.expect(step, budget_s)
        return step

    def _lose_step(self, error: Exception) -> None:
        self._watchdog.fail(f"steps do not reach all ranks: {error}")

    def take(self, limit_s: float | None = 0.0) -> Record | None:
        """Returns the next answer, in order of steps; None after the limit. Raises GroupLost."""
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
            each.stop()
        if self._remote_answers is not None:
            self._remote_answers.close()
        deadline = time.monotonic() + STOP_S
        for each in self._handles:
            each.wait(max(0.0, deadline - time.monotonic()))
            each.close()
        self._steps.close()
        self._local_steps.close()
        self._answers.close()
        self._files.close()
        for host in self._remote:
            host.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remote_handles(spec: GroupSpec) -> list[Handle]:
    """Returns the handles of ranks that other hosts start now."""
    found: list[Handle] = []
    for host in spec.remote:
        for rank in host.ranks:
            control = host.sockets["control", rank]
            limits = {"limit_s": spec.limit_s, "silent_s": spec.silent_s}
            found.append(RemoteHandle(rank, host.name, control, **limits))
            found[-1].send(spec.start(rank))
    return found
