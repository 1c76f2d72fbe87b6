"""Ends a group of ranks as one: when a rank ends, fails, is stopped, or a step takes too long."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from shared.engine.parallel.processes.rank_messages import (
    MAX_MESSAGE_BYTES,
    Failed,
    Ready,
    StepExtended,
    ToLeader,
    ToRank,
    decode_to_leader,
    encode,
)

TICK_S = 0.25  # budgets are checked as often; an ended rank is noticed at once
KILLED_S = 5.0  # a killed rank ends within it, unless a driver holds it
STOPPED_S = 1.0  # a rank that is stopped (SIGSTOP) for longer is lost, also without a step


class GroupLost(RuntimeError):
    """The ranks of a group have ended; the message says which one caused it."""


class Handle(Protocol):
    """A rank at its leader. `fds` are readable when it has ended or sent a message."""

    @property
    def rank(self) -> int: ...

    @property
    def fds(self) -> tuple[int, ...]: ...

    def send(self, message: ToRank) -> None:
        """Sends a message. Does nothing if the rank has ended."""

    def receive(self) -> ToLeader | None:
        """Returns a message that has come, if any. Damaged ones count as a failure of the rank."""

    def has_ended(self) -> bool: ...

    def ending(self) -> str:
        """Describes how the rank ended."""

    def is_stopped(self) -> bool: ...

    def kill(self) -> None: ...

    def stop(self) -> None:
        """Ends the connection, so that the rank ends by itself."""

    def wait(self, limit_s: float) -> None:
        """Waits for the rank's end."""

    def close(self) -> None: ...


class RankProcess(Protocol):
    """The part of `subprocess.Popen` that a rank's handle uses."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""


@dataclass(frozen=True)
class RankHandle:
    """A rank process of this host. See Handle."""

    rank: int
    process: RankProcess
    pidfd: int
    control: socket.socket

    @property
    def fds(self) -> tuple[int, ...]:
        return self.pidfd, self.control.fileno()

    def send(self, message: ToRank) -> None:
        with contextlib.suppress(OSError):
            self.control.send(encode(message))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            self.control.shutdown(socket.SHUT_RDWR)

    def wait(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)

    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def receive(self) -> ToLeader | None:
        try:
            data = self.control.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            return decode_to_leader(data) if data else None
        except OSError:
            return None
        except msgspec.DecodeError as error:
            return Failed(f"its message is damaged: {error}")

    def ending(self) -> str:
        """Waits for the process, which has ended."""
        code = self.process.wait()
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def close(self) -> None:
        """Leaves a process that does not end: one that waits in a driver ends after its call."""
        self.kill()
        self.wait(KILLED_S)
        self.control.close()
        os.close(self.pidfd)


def ended(handles: Sequence[Handle], limit_s: float) -> list[Handle]:
    """Returns the handles that end or send a message within the limit."""
    poll = select.poll()
    by_fd = {fd: each for each in handles for fd in each.fds}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    ready = {by_fd[fd].rank for fd, _ in poll.poll(limit_s * 1000)}
    return [each for each in handles if each.rank in ready]


def ignore_extension(seconds: float) -> None:
    """Takes the extension of steps of a caller who expects none."""


def failure_of(
    handles: Sequence[Handle], on_extended: Callable[[float], None] = ignore_extension
) -> str | None:
    """Returns the reason that the first of these has ended; None for one that has only said that it
    is ready. `on_extended` gets the seconds by which a rank extends the steps in flight.

    A killed rank is named before those that failed because it no longer answered.
    """
    lines = []
    for each in handles:
        message = each.receive()
        if isinstance(message, Failed):
            lines.append((1, f"rank {each.rank} failed: {message.line}"))
        elif isinstance(message, Ready):
            lines.append((2, f"rank {each.rank} said twice that it is ready"))
        elif isinstance(message, StepExtended):
            on_extended(message.seconds)
        elif each.has_ended():
            lines.append((0, f"rank {each.rank} ended: {each.ending()}"))
    return min(lines, default=(0, None))[1]


class StoppedRanks:
    """Records since when ranks are stopped, as seen by `check`."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def check(self, handles: Sequence[Handle]) -> str | None:
        """Names a rank that has been stopped for too long."""
        now = time.monotonic()
        stopped = [each.rank for each in handles if each.is_stopped()]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        late = [rank for rank, since in self._since.items() if now - since > STOPPED_S]
        return f"rank {late[0]} is stopped" if late else None


class Watchdog:
    """A thread that kills all ranks when one is lost, then calls `on_lost` once.

    Steps are answered in order: the budget of a step begins when the step before it is answered. No
    step is late while `has_answer` says that the leader has not taken an answer.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        on_lost: Callable[[], None],
        has_answer: Callable[[], bool],
    ) -> None:
        self._handles = handles
        self._stopped = StoppedRanks()
        self._on_lost, self._has_answer = on_lost, has_answer
        self._budgets: dict[int, float] = {}  # step -> seconds, in order
        self._began_at = 0.0  # of the first of these
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: str | None = None
        self.reason: str | None = None
        self.on_extended: Callable[[], None] = lambda: None  # called by the watchdog's thread
        self._thread = threading.Thread(target=self._watch, name="rank-watchdog", daemon=True)
        self._thread.start()

    def expect(self, step: int, budget_s: float) -> None:
        with self._lock:
            if not self._budgets:
                self._began_at = time.monotonic()
            self._budgets[step] = budget_s

    def fail(self, reason: str) -> None:
        """Ends the group at the next tick, from any thread. The first reason counts."""
        self._failure = self._failure or reason

    def answered(self, step: int) -> None:
        with self._lock:
            self._budgets.pop(step, None)
            self._began_at = time.monotonic()

    def _extend(self, seconds: float) -> None:
        with self._lock:
            self._budgets = {step: each + seconds for step, each in self._budgets.items()}
        self.on_extended()

    def _watch(self) -> None:
        while not self._is_closed:
            found = ended(self._handles, TICK_S)
            reason = failure_of(found, self._extend) or self._failure
            reason = reason or self._overdue() or self._stopped.check(self._handles)
            if reason is not None and not self._is_closed:
                self._end(reason)
                return

    def _overdue(self) -> str | None:
        with self._lock:
            step, budget_s = next(iter(self._budgets.items()), (-1, math.inf))
            is_late = time.monotonic() - self._began_at > budget_s
        if not is_late or self._has_answer():
            return None
        stopped = [str(each.rank) for each in self._handles if each.is_stopped()]
        who = f": rank {', '.join(stopped)} is stopped" if stopped else ""
        return f"step {step} has taken longer than its budget of {budget_s:g} s{who}"

    def _end(self, reason: str) -> None:
        for each in self._handles:
            each.kill()
        self.reason = reason
        self._on_lost()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
