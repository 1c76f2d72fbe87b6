"""Closes a client's connection when the client takes no byte for too long.

    empty ──bytes wait to be sent──▶ waiting ──all sent──▶ empty
                                        └──no byte taken for `timeout_s`──▶ aborted

The server sends a response's next part only from `empty`, so at most one part waits. With TLS
another part of about 64 KiB may wait uncounted between TLS and the kernel: a slow client counts as
reading only once it has taken that part.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from litestar.types import Scope

EXTENSION = "hearth.connection"  # a key of an ASGI scope's extensions
KEEP_ALIVE_IDLE_S = 60  # seconds of silence before TCP probes the peer
KEEP_ALIVE_INTERVAL_S = 10
KEEP_ALIVE_PROBES = 3
MAX_KERNEL_BYTES = 64 * 1024  # unsent bytes in the kernel; further ones wait in this process
CHECKS_PER_TIMEOUT = 8
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def watch_peers(listening: socket.socket, timeout_s: float) -> None:
    """Sets TCP's options for all connections of a listening socket: the kernel disconnects a peer
    that no longer exists, or that takes no byte for twice `timeout_s`. The gateway's own timeout
    comes first, and records that the client is slow.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        socket.TCP_KEEPIDLE: KEEP_ALIVE_IDLE_S,
        socket.TCP_KEEPINTVL: KEEP_ALIVE_INTERVAL_S,
        socket.TCP_KEEPCNT: KEEP_ALIVE_PROBES,
        socket.TCP_USER_TIMEOUT: round(2 * timeout_s * 1000),
        socket.TCP_NOTSENT_LOWAT: MAX_KERNEL_BYTES,
    }
    for option, value in options.items():
        listening.setsockopt(socket.IPPROTO_TCP, option, value)


class ClientConnection:
    """The connection of one client. `on_slow` is called once if it is closed because its client
    does not read.
    """

    def __init__(
        self, transport: asyncio.Transport, timeout_s: float, on_slow: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_slow = on_slow
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._num_waiting = 0  # bytes after the client last took one
        self._taken_at = 0.0
        self.is_slow = False
        self.is_lost = False

    def start(self) -> None:
        """Makes the transport report every waiting byte, which it may do before this returns."""
        is_tls = self._transport.get_extra_info("sslcontext") is not None
        # An unencrypted transport reports above the limit, TLS at the limit.
        self._transport.set_write_buffer_limits(high=int(is_tls))

    async def sent(self) -> None:
        """Returns once no byte waits or the connection is lost."""
        await self._is_empty.wait()

    def abort_slow(self) -> None:
        """Resets the connection and drops its bytes, also those in the kernel. Idempotent."""
        if self.is_slow or self.is_lost:
            return
        self.is_slow = True
        self._on_slow()
        peer = self._transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    # ── events of the transport ──────────────────────────────────────────────────────────────────

    def bytes_wait(self) -> None:
        self._is_empty.clear()
        self._num_waiting = self._transport.get_write_buffer_size()
        self._taken_at = self._loop.time()
        self._check_later()

    def bytes_sent(self) -> None:
        self._is_empty.set()
        self._stop_checking()

    def lost(self) -> None:
        self.is_lost = True
        self._is_empty.set()
        self._stop_checking()

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _check_later(self) -> None:
        self._stop_checking()
        self._timer = self._loop.call_later(self._timeout_s / CHECKS_PER_TIMEOUT, self._check)

    def _stop_checking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        num_waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        if num_waiting < self._num_waiting:
            self._num_waiting, self._taken_at = num_waiting, now
        if now - self._taken_at >= self._timeout_s:
            self.abort_slow()
        else:
            self._check_later()


def connection_of(scope: Scope) -> ClientConnection:
    connection = (scope.get("extensions") or {})[EXTENSION]
    assert isinstance(connection, ClientConnection)
    return connection
