"""An HTTP server inside our own event loop.

uvicorn rather than the faster Granian: Granian's embedded server notices leaving clients and slow
readers as well, but calls itself experimental and cannot report the port it got for port 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shared.errors import ConfigError

LISTEN_BACKLOG = 2048
GRACE_S = 5
# Longer than clients keep an idle connection (httpx, and with it OpenAI's SDK, 5 s): who closes it
# is then the client, and no request meets a connection that is being closed.
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 1024
# A client that takes longer to send a request holds a connection, and memory, for nothing.
HEAD_TIMEOUT_S = 10.0  # from the first byte, or the connection's start, to the last header
BODY_TIMEOUT_S = 60.0  # then to the last byte


class HeadWithBody:
    """A transport for one response: its head leaves with the first of its body, in one segment.

    Not for answers to HEAD, which have no body to go with.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._head:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


class _Http(HttpToolsProtocol):
    """uvicorn's, with bounds on what it waits for and gathers without any: the size of a request's
    head and trailers, and the time that head and body take.

    idle ──first byte──▶ head ──last header──▶ body ──last byte──▶ idle
    A connection begins in `head`. Idle ones are uvicorn's to close.
    """

    def __init__(self, *args: Any, head_timeout_s: float, body_timeout_s: float, **named: Any):
        super().__init__(*args, **named)
        self._head_timeout_s = head_timeout_s
        self._body_timeout_s = body_timeout_s
        self._num_gathered_bytes = 0  # since the parser last let go of something
        self._is_idle = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self._head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._is_idle = False
            self._wait(self._head_timeout_s)
        self._num_gathered_bytes += len(data)
        super().data_received(data)
        if self._num_gathered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._num_gathered_bytes = 0
        self._wait(self._body_timeout_s)
        super().on_headers_complete()
        if self.scope["method"] != "HEAD" and not self.expect_100_continue:
            self.cycle.transport = HeadWithBody(self.cycle)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._num_gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_gathered_bytes = 0
        self._stop_waiting()
        self._is_idle = True
        super().on_message_complete()

    def _wait(self, timeout_s: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(timeout_s, self._too_slow, timeout_s)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self, timeout_s: float) -> None:
        if self.flow.read_paused:  # it is this side that does not read
            self._wait(timeout_s)
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process; tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_listening.set()


class WebServer:
    """Sockets have TCP_NODELAY, as asyncio sets it: an event leaves at once."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """Port 0 takes a free one. Raises ConfigError if the address cannot be bound."""
        try:
            self._socket = _bound_socket(host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]  # Litestar's ASGI types are stricter than uvicorn's
            http=partial(  # type: ignore[arg-type]  # called like the class
                _Http, head_timeout_s=head_timeout_s, body_timeout_s=body_timeout_s
            ),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # nobody asks for a client's address
            backlog=LISTEN_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Returns when connections are accepted; raises what kept the server from it."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        listening = asyncio.create_task(self._server.is_listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Open responses get a few seconds to be written out."""
        if self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._task


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
