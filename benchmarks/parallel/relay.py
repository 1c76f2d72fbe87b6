"""A TCP relay between ranks that is as slow as a link: a rate in each direction, and a latency."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK_BYTES = 32 * 1024
MAX_CHUNKS = 512  # on their way in one direction: more than any link here has room for


@dataclass
class Direction:
    """Bytes leave one after the other at `bytes_per_s`, and arrive `latency_s` later."""

    bytes_per_s: float
    latency_s: float
    num_bytes: int = 0
    _free_at: float = 0.0
    _chunks: queue.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: queue.Queue(MAX_CHUNKS)
    )

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        for work, end in ((self._take, source), (self._deliver, target)):
            threading.Thread(target=work, args=(end,), daemon=True).start()

    def _take(self, source: socket.socket) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            self.num_bytes += len(data)
            sent_at = max(time.monotonic(), self._free_at) + len(data) / self.bytes_per_s
            self._free_at = sent_at
            self._chunks.put((sent_at + self.latency_s, data))

    def _deliver(self, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_at, data = self._chunks.get()
                time.sleep(max(0.0, due_at - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


class Relay:
    """Listens on a free port of `host`, and relays each connection to `target()`."""

    def __init__(
        self, host: str, target: Callable[[], tuple[str, int]], rate: float, latency_s: float
    ) -> None:
        self._target = target
        self._limits = rate, latency_s
        self._server = socket.create_server((host, 0))
        self._directions: list[Direction] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    @property
    def num_bytes(self) -> int:
        """Relayed so far, in both directions."""
        return sum(each.num_bytes for each in self._directions)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target())
                for source, target in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    direction = Direction(*self._limits)
                    self._directions.append(direction)
                    direction.carry(source, target)

    def close(self) -> None:
        self._server.close()
