"""A TCP relay that is as slow as a link or a distance: a rate in each direction, and a latency."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Self

LOCALHOST = "127.0.0.1"
CHUNK_BYTES = 32 * 1024
MAX_CHUNKS = 512  # limit in one direction: more than any link here holds

Address = tuple[str, int]


class SlowRelay:
    """Listens on `port` of `host`, 0: a free one, and relays each connection to `target()`. Accepts
    at once: only the bytes of a connection are delayed.

    Bytes leave one after the other at `bytes_per_s`, and arrive `latency_s` later, which may
    change. `hold` makes it accept all and pass on nothing, until `release`.
    """

    def __init__(
        self,
        target: Callable[[], Address],
        *,
        latency_s: float,
        bytes_per_s: float = inf,
        host: str = LOCALHOST,
        port: int = 0,
    ) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._target = target
        self._server = socket.create_server((host, port))
        self.port: int = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._forth, self._back = threading.Event(), threading.Event()  # whether bytes pass
        self.release()
        self._directions: list[_Direction] = []
        _thread(self._serve)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, *, forth: bool = True, back: bool = True) -> None:
        """Holds what goes to the target, and what comes back from it."""
        for is_held, passes in ((forth, self._forth), (back, self._back)):
            if is_held:
                passes.clear()

    def release(self) -> None:
        """Passes on what was held, too."""
        self._forth.set()
        self._back.set()

    def close(self) -> None:
        self.release()
        for each in (self._server, *self._ends):
            with contextlib.suppress(OSError):  # wakes the threads that wait for it
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def is_delayed(self, connection: socket.socket) -> bool:
        """Whether this accepted connection is slow; by default all are."""
        return True

    @property
    def num_bytes(self) -> int:
        """Relayed so far, in both directions."""
        return sum(each.num_bytes for each in self._directions)

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(self._target())
            except OSError:
                near.close()
                continue
            self._ends += near, far
            is_delayed = self.is_delayed(near)
            for source, target, passes in ((near, far, self._forth), (far, near, self._back)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                direction = _Direction(self, source, target, passes, is_delayed=is_delayed)
                self._directions.append(direction)


class LinkRelay:
    """A `SlowRelay` whose port refuses connections while it is cut. The port stays its own."""

    def __init__(
        self, target_port: int, *, latency_s: float = 0.0, bytes_per_s: float = inf
    ) -> None:
        self._target = LOCALHOST, target_port
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._reserved = socket.socket()  # never listens
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((LOCALHOST, 0))
        self.port: int = self._reserved.getsockname()[1]
        self._relay: SlowRelay | None = None
        self.open()

    def cut(self) -> None:
        """Ends all connections, and refuses new ones."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def hold(self, *, forth: bool = True, back: bool = True) -> None:
        assert self._relay is not None, "the link is cut"
        self._relay.hold(forth=forth, back=back)

    def open(self) -> None:
        """Ends a cut or a hold."""
        if self._relay is None:
            self._relay = SlowRelay(
                lambda: self._target,
                latency_s=self._latency_s,
                bytes_per_s=self._bytes_per_s,
                port=self.port,
            )
        self._relay.release()

    def close(self) -> None:
        self.cut()
        self._reserved.close()


class _Direction:
    def __init__(
        self,
        relay: SlowRelay,
        source: socket.socket,
        target: socket.socket,
        passes: threading.Event,
        *,
        is_delayed: bool,
    ) -> None:
        self.num_bytes = 0
        self._is_delayed = is_delayed
        self._relay, self._source, self._target = relay, source, target
        self._passes = passes
        self._free_at = 0.0
        self._chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_CHUNKS)
        _thread(self._take)
        _thread(self._deliver)

    def _take(self) -> None:
        data = b"."
        while data:
            try:
                data = self._source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            self.num_bytes += len(data)
            self._chunks.put((self._due_at(len(data)), data))

    def _due_at(self, num_bytes: int) -> float:
        now = time.monotonic()
        if not self._is_delayed:
            return now
        self._free_at = max(now, self._free_at) + num_bytes / self._relay.bytes_per_s
        return self._free_at + self._relay.latency_s

    def _deliver(self) -> None:
        while True:
            due_at, data = self._chunks.get()
            time.sleep(max(0.0, due_at - time.monotonic()))
            self._passes.wait()
            if not data:
                self._target.shutdown(socket.SHUT_WR)
                return
            self._target.sendall(data)


def _thread(work: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):  # closed
            work()

    threading.Thread(target=run, daemon=True).start()
