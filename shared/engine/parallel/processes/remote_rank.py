"""A rank of another host at its leader, and the answers that come from there."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from shared.engine.parallel.processes.frames import ConnectionLost, FrameSocket, SocketReader
from shared.engine.parallel.processes.rank_messages import (
    Failed,
    RankAlive,
    ToLeader,
    ToRank,
    decode_to_leader,
    encode,
)
from shared.engine.parallel.processes.records import RingError
from shared.engine.parallel.processes.ring import RingFull, RingWriter

POLL_S = 0.25


class RemoteHandle:
    """See Handle. The rank's host ends the rank when this connection ends. A host that says nothing
    for `silent_s` is stopped, or out of reach.
    """

    def __init__(
        self, rank: int, host: str, control: socket.socket, *, limit_s: float, silent_s: float
    ) -> None:
        self.rank = rank
        self._host = host
        self._frames = FrameSocket(control, limit_s)
        self._loss: str | None = None
        self._silent_s = silent_s
        self._received_at = time.monotonic()

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._frames.fileno(),)

    def send(self, message: ToRank) -> None:
        with contextlib.suppress(ConnectionLost):  # `receive` finds it
            self._frames.send(encode(message))

    def receive(self) -> ToLeader | None:
        try:
            while (data := self._frames.take()) is not None:
                self._received_at = time.monotonic()
                message = decode_to_leader(data)
                if not isinstance(message, RankAlive):
                    return message
            return None
        except ConnectionLost as error:
            self._loss = f"the connection to {self._host} is lost: {error}"
            return None
        except msgspec.DecodeError as error:
            return Failed(f"its message is damaged: {error}")

    def has_ended(self) -> bool:
        return self._loss is not None

    def ending(self) -> str:
        return self._loss or f"on {self._host}"

    def is_stopped(self) -> bool:
        """Whether its host is: the host reports a rank that is stopped as failed."""
        return time.monotonic() - self._received_at > self._silent_s

    def kill(self) -> None:
        self._frames.shutdown()

    stop = kill

    def wait(self, limit_s: float) -> None:
        """Returns at once: the rank's host waits for it."""

    def close(self) -> None:
        self._frames.shutdown()
        self._frames.close()


class RemoteAnswers:
    """A thread that writes the answers from another host to the ring that the leader reads.

    `on_lost` is called once if they do not come as a rank writes them.
    """

    def __init__(
        self, steps: FrameSocket, answers: RingWriter, on_lost: Callable[[str], None]
    ) -> None:
        self._frames, self._answers, self._on_lost = steps, answers, on_lost
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="rank-answers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reader = SocketReader(self._frames)
        try:
            while not self._is_closed:
                select.select([self._frames], [], [], POLL_S)
                while (record := reader.take()) is not None:
                    self._answers.write(record)
        except (ConnectionLost, RingError, RingFull, ValueError, OSError) as error:
            if not self._is_closed:
                self._on_lost(f"the answers of another host are lost: {error}")

    def close(self) -> None:
        self._is_closed = True
        self._frames.shutdown()
        self._thread.join()
        self._answers.close()
