"""Detects whether a client that has closed its sending side still reads.

    half closed ──probe answered by a reset, or a write──▶ aborted
         └──response sent──▶ closed by the server

TCP shows this only once something is sent: `100 Continue`, which clients of HTTP/1.1 ignore. If the
client of a TCP proxy has left, the proxy closes its client's side after the first probe and its own
side after the second, and resets the connection after the third. Later, the kernel's keep-alive
probes or the parts of a stream detect it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_CHECK_S = 0.01
MAX_CHECK_S = 1.0
PROBE_AFTER_S = 0.3  # the shortest time between probes, in which a proxy gets an answer
MAX_PROBES = 4  # Go's client accepts five such answers
_CLOSE_WAIT = 8  # a state of TCP in Linux


class HalfClosed:
    """Aborts the transport once its peer has left. `may_probe` returns whether no response has
    begun.
    """

    def __init__(self, transport: asyncio.Transport, may_probe: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_probe = may_probe
        self._loop = asyncio.get_running_loop()
        self._delay_s = FIRST_CHECK_S
        self._num_probes = 0
        self._probe()
        self._timer = self._loop.call_later(self._delay_s, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _probe(self) -> None:
        if self._num_probes < MAX_PROBES and self._may_probe():
            self._num_probes += 1
            self._transport.write(CONTINUE)

    def _check(self) -> None:
        peer = self._transport.get_extra_info("socket")
        (state,) = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state != _CLOSE_WAIT:
            self._transport.abort()
            return
        if self._delay_s >= PROBE_AFTER_S:
            self._probe()
        self._delay_s = min(MAX_CHECK_S, 2 * self._delay_s)
        self._timer = self._loop.call_later(self._delay_s, self._check)
