"""An HTTP server in the gateway's event loop.

It uses uvicorn rather than the faster Granian. Granian's embedded server detects disconnected
clients and slow readers as well, but is declared experimental and cannot report the port chosen
for port 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.http.certificate import Certificate
from services.gateway.http.connection import EXTENSION, ClientConnection, watch_peers
from services.gateway.http.connections import Connections, Holder, OpenConnection
from services.gateway.http.headers import Headers, authorization_of
from services.gateway.http.protocol.half_closed import HalfClosed
from services.gateway.http.protocol.read_deadline import ReadDeadline
from services.gateway.http.versions import HTTP_1_0, has_valid_host, send_without_chunks
from services.gateway.streams.fair_starts import FairStarts
from services.gateway.tenancy.api_keys import ApiKeys
from shared.background import Background, start_awaited
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import ConfigError, NoCapacity
from shared.nats_urls import authority

TenantOf = Callable[[Headers], str | None]  # takes a request's headers

ON_AUTHENTICATED = "on_authenticated"  # key in a request's state: takes the tenant's id
IS_RESERVED = "is_reserved"  # key in a request's state: whether the connection is reserved
PROBES = ("/health", "/ready", "/metrics")  # also on reserved connections
_PROBE = ("probe", "")
OPERATOR = ""  # stands for a tenant's id
LISTEN_BACKLOG = 2048  # the maximum
# libuv accepts one connection of a listening descriptor in a turn of the loop. With several
# descriptors of one socket, new connections do not wait for one request start each.
NUM_LISTENERS = 16
GRACE_S = 5
# Longer than the idle timeout of clients (httpx, and so OpenAI's SDK: 5 s): the client closes the
# connection, and no request is sent on a connection that the server is closing.
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 1024
MAX_READS_PER_TURN = 16  # about 50 us each; libuv itself reads from all connections in one turn
LARGE_READ_BYTES = 64 * 1024  # then other connections are read
MAX_PIPELINED = 16  # requests of a connection that wait for their responses
# Limits for slow clients, which occupy a connection and memory.
HEAD_TIMEOUT_S = 10.0  # the connection's start or first byte to the last header
BODY_TIMEOUT_S = 60.0  # the last header to the last byte
WRITE_TIMEOUT_S = 30.0  # the client takes no byte
TICK_S = 0.1  # uvicorn's tick, of which each tenth renews the date of responses
FIRST_REQUEST_S = 1.0  # after the last connection
STOP_POLL_S = 0.01  # between checks whether the last responses are sent


def probes_alone(app: ASGIApp) -> ASGIApp:
    """Returns an application that raises NoCapacity for requests other than probes on reserved
    connections.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["state"].get(IS_RESERVED) and scope["path"] not in PROBES:
            raise NoCapacity("all connections of the gateway are in use", retry_after_s=1.0)
        await app(scope, receive, send)

    return served


class HeadWithBody:
    """A transport that sends the head of one response and its first body bytes in one segment. It
    is not for responses to HEAD, which have no body.
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
    """uvicorn's protocol, plus limits that uvicorn lacks: the size of a request's head and
    trailers, the time for head and body, the time that a client may leave its response unread, and
    the numbers of connections and of requests that a connection queues.

    idle ──first byte──▶ head ──last header──▶ body ──last byte──▶ idle
    A connection starts in `head`. uvicorn closes idle connections.
    """

    def __init__(
        self,
        *args: Any,
        head_timeout_s: float,
        body_timeout_s: float,
        write_timeout_s: float,
        on_slow_client: Callable[[], None],
        connections: Connections,
        reads: FairStarts,
        starts: FairStarts,
        tenant_of: TenantOf,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._connections = connections
        self._reads = reads
        self._starts = starts
        self._tenant_of = tenant_of
        self._place: OpenConnection | None = None
        self._grace = ReadDeadline(self.loop)
        self._half_closed: HalfClosed | None = None
        self._head_timeout_s = head_timeout_s
        self._body_timeout_s = body_timeout_s
        self._write_timeout_s = write_timeout_s
        self._on_slow_client = on_slow_client
        self._unanswered: list[RequestResponseCycle] = []
        self._num_waiting = 0  # requests that have not started
        self._unparsed = b""
        self._num_buffered_bytes = 0  # bytes since the parser's last event
        self._is_idle = False
        self.has_request = False  # or is closed
        self._patience = ReadDeadline(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = ClientConnection(transport, self._write_timeout_s, self._on_slow_client)
        self._connection.start()
        address = self.client[0] if self.client else ""
        self._place = self._connections.open(address, transport.close)
        if self._place is None:
            transport.close()
            return
        self._grace.start(self._connections.grace_s, self._end_grace)
        self._wait(self._head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_request = True
        self._patience.stop()
        self._grace.stop()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._connection.lost()
        if self._place is not None:
            self._place.lose()
        for cycle in self._unanswered:  # uvicorn only marks the last one
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        # They refer to this object, which would stay in memory until a full garbage collection.
        self.cycle, self.scope, self._unanswered = None, None, []  # type: ignore[assignment]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open for the responses to complete requests. It does
        not once a response has begun, since clients that leave end it in the same way. TLS closes
        it, and an HTTP/1.0 peer cannot be probed.
        """
        if self._half_closed is not None:  # called again between pipelined requests
            return True
        is_1_0 = any(each.scope["http_version"] == HTTP_1_0 for each in self._unanswered)
        if is_1_0 or self.scheme == "https" or not self._waits_for_response():
            return False
        if self._unanswered[-1].more_body:
            return False
        self._unanswered[-1].keep_alive = False
        self._half_closed = HalfClosed(self.transport, self._waits_for_response)
        return True

    def _waits_for_response(self) -> bool:
        """Returns whether bytes that are sent now stand before a response, not within one."""
        return bool(self._unanswered) and not any(e.response_started for e in self._unanswered)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection.bytes_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection.bytes_sent()

    def data_received(self, data: bytes) -> None:
        """Parses `data` now or, if many connections have received data, in a later turn."""
        if self._place is None:
            return
        self._unparsed += data
        if len(self._unparsed) > len(data):  # `_parse` is already due
            return
        self._reads.start(self._place.holder, self._parse)
        if self._unparsed and not self.transport.is_closing():
            self.transport.pause_reading()

    def _parse(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self._read_on()
        if self.transport.is_closing():
            return
        if self._is_idle:
            self._is_idle = False
            self._wait(self._head_timeout_s)
        self._num_buffered_bytes += len(data)
        super().data_received(data)
        if self._num_buffered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        if len(data) >= LARGE_READ_BYTES:
            self._end_turn()

    def _end_turn(self) -> None:
        """Pauses reading until the loop's next turn: libuv reads a connection with more data up to
        32 times, 8 MiB, before it polls others.
        """
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def on_headers_complete(self) -> None:
        self.has_request = True
        self._num_buffered_bytes = 0
        self._wait(self._body_timeout_s)
        http_version = self.parser.get_http_version()
        if not has_valid_host(self.headers, http_version):
            raise ValueError("not one Host header")  # ends the parsing: uvicorn answers 400
        super().on_headers_complete()
        if http_version == HTTP_1_0:
            send_without_chunks(self.cycle)
        self._unanswered.append(self.cycle)
        if self._place is not None:
            self._place.begin()
            self.cycle.keep_alive = self.cycle.keep_alive and not self._place.is_reserved
        if len(self._unanswered) > MAX_PIPELINED:
            raise ConnectionError("too many requests wait for their responses")  # ends the parsing
        self.scope["extensions"] = {EXTENSION: self._connection}  # type: ignore[dict-item]
        self.scope["state"][ON_AUTHENTICATED] = self._authenticated
        self.scope["state"][IS_RESERVED] = self._place is not None and self._place.is_reserved
        if self.scope["method"] != "HEAD" and not self.expect_100_continue:
            self.cycle.transport = HeadWithBody(self.cycle)  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._num_waiting += 1
        self._starts.start(self._sender_of(cycle), partial(self._start_now, cycle, app))

    def _start_now(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._num_waiting -= 1
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def _sender_of(self, cycle: RequestResponseCycle) -> Holder:
        if cycle.scope["path"] in PROBES:
            return _PROBE
        tenant_id = self._tenant_of(cycle.scope["headers"])
        if tenant_id is not None:
            return ("tenant", tenant_id)
        return ("address", self.client[0] if self.client else "")

    def on_response_complete(self) -> None:
        self._unanswered = [each for each in self._unanswered if not each.response_complete]
        if self._place is not None and not self._unanswered:
            self._place.end()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Sends the error, or only closes the connection if the client would take `msg` for a
        response to an earlier request, or for a part of one.
        """
        if any(each.response_started or not each.more_body for each in self._unanswered):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        self._num_buffered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_buffered_bytes = 0
        self._patience.stop()
        self._is_idle = True
        super().on_message_complete()

    def _authenticated(self, tenant_id: str) -> None:
        """Records a request with a valid API key. The application calls it. Raises Overloaded if
        the tenant has too many connections.
        """
        if self._place is not None:
            self._place.authenticate(tenant_id)

    def _end_grace(self) -> None:
        if self._place is None or self._connections.may_stay(self._place):
            return
        # A pending request may still authenticate.
        if self._unparsed or self._num_waiting or self._waits_for_response():
            self._grace.start(self._connections.grace_s, self._end_grace)
        else:
            self.transport.close()

    def _wait(self, timeout_s: float) -> None:
        self._patience.start(timeout_s, partial(self._too_slow, timeout_s))

    def _too_slow(self, timeout_s: float) -> None:
        if self.flow.read_paused or self._unparsed:  # the server has paused reading
            self._wait(timeout_s)
        else:
            self.transport.close()


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process and sets `is_listening` after startup.
    Without connections it stops at once, whereas uvicorn polls ten times a second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._is_stopping.set()

    async def main_loop(self) -> None:
        num_ticks = 0
        while not await self.on_tick(num_ticks):
            num_ticks += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._is_stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for each in (*self.servers, *(sockets or ())):
            each.close()
        await self._receive_first_requests()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110  # they have no event
                    await asyncio.sleep(STOP_POLL_S)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    async def _receive_first_requests(self) -> None:
        """Waits for the requests of connections that have just been opened: their clients could not
        know whether a request without an answer was served.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REQUEST_S):
                while not all(  # noqa: ASYNC110  # they have no event
                    getattr(each, "has_request", True) for each in self.server_state.connections
                ):
                    await asyncio.sleep(STOP_POLL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_listening.set()


class WebServer:
    """Serves an ASGI application. asyncio sets TCP_NODELAY, so events are sent immediately."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        keep_alive_s: int = KEEP_ALIVE_S,
        on_slow_client: Callable[[], None] = lambda: None,
        connections: Connections | None = None,
        tenant_of: TenantOf = lambda headers: None,
        certificate: Certificate | None = None,
    ) -> None:
        """Port 0 selects a free port. `tenant_of` returns the tenant for whom a request starts in
        turn, or None for the client's address. A `certificate` enables HTTPS. Raises ConfigError if
        the address cannot be bound.
        """
        try:
            self._socket = _bound_socket(host, port)
            watch_peers(self._socket, write_timeout_s)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.connections = Connections() if connections is None else connections
        self._starts = FairStarts()
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]  # Litestar's ASGI types are stricter than uvicorn's
            http=partial(  # type: ignore[arg-type]  # called like the class
                _Http,
                head_timeout_s=head_timeout_s,
                body_timeout_s=body_timeout_s,
                write_timeout_s=write_timeout_s,
                on_slow_client=on_slow_client,
                connections=self.connections,
                reads=FairStarts(max_per_turn=MAX_READS_PER_TURN),
                starts=self._starts,
                tenant_of=tenant_of,
            ),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # a client could claim any address
            backlog=min(LISTEN_BACKLOG, max(16, self.connections.max_of_tenant)),
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=GRACE_S,
        )
        if certificate is not None:
            config.load()
            config.ssl = certificate.context
        self._certificate = certificate
        self._scheme = "http" if certificate is None else "https"
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None
        self._background = Background()

    @classmethod
    def of(
        cls,
        config: GatewayConfig,
        app: ASGIApp,
        api_keys: ApiKeys,
        *,
        on_slow_client: Callable[[], None],
    ) -> Self:
        """Returns a server as `config` describes it. Raises ConfigError if the address cannot be
        bound or the certificate cannot be read.
        """
        return cls(
            app,
            config.http_host,
            config.http_port,
            write_timeout_s=config.write_timeout_s,
            on_slow_client=on_slow_client,
            tenant_of=lambda headers: api_keys.known_tenant_id(authorization_of(headers)),
            certificate=(
                Certificate(config.http_cert, config.http_key) if config.http_cert else None
            ),
        )

    @property
    def certificate_expires_at(self) -> float | None:
        """Returns seconds since 1970; None without HTTPS."""
        return None if self._certificate is None else self._certificate.expires_at

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        return f"{self._scheme}://{authority(*self.address)}"

    async def start(self, clock: Clock | None = None) -> None:
        """Returns once the server accepts connections, or raises the error of a failed start.
        `clock` times the polls of the certificate's files; they are not polled if it is None.
        """
        sockets = [self._socket, *(self._socket.dup() for _ in range(NUM_LISTENERS - 1))]
        self._task = start_awaited(self._server.serve(sockets=sockets))
        listening = start_awaited(self._server.is_listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
        self._background.start_own(self._serve())
        if self._certificate is not None and clock is not None:
            self._background.start_own(self._certificate.watch(clock))

    async def _serve(self) -> None:
        """Raises RuntimeError if the server ends without `stop`: the gateway would otherwise run
        without clients.
        """
        assert self._task is not None
        await asyncio.shield(self._task)
        if not self._server.should_exit:
            raise RuntimeError("the HTTP server has ended")

    def close_after_responses(self) -> None:
        """Makes each later response end its connection: clients connect to another gateway."""
        headers = self._server.config.encoded_headers
        headers.append((b"connection", b"close"))
        state = self._server.server_state  # renewed from `headers` every second
        state.default_headers = [*state.default_headers, headers[-1]]

    async def stop(self) -> None:
        """Stops the server; open responses have GRACE_S seconds to finish."""
        if self._task is None:
            self._socket.close()
            return
        self._server.stop()
        await asyncio.wait({self._task})
        await self._background.stop()


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
