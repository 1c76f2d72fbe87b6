"""Streaming HTTP clients of low cost: raw asyncio protocols on keep-alive connections.

A client shares the machine with the server that it measures. `Connection` searches each event for
text and records its time; it decodes usage from the last event. TCP_NODELAY and TCP_QUICKACK are
set: delayed acknowledgements would show up as 40 ms gaps in the server's stream.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from typing import Any, Self, cast
from urllib.parse import urlsplit

import msgspec

from shared.errors import DependencyUnavailable
from shared.transport.wire_errors import UNREADABLE

TEXT = re.compile(rb'"(?:content|text|response|delta)":\s*"(?!")')
_USAGE = re.compile(rb'"usage":\s*\{')
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it; times in seconds of the client's monotonic clock."""

    started: float
    arrivals: tuple[float, ...]  # times of events that carry text
    ended: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_output_tokens - 1)


class BodyReader:
    """Splits an HTTP/1.1 response, chunked or with a length, into parts of its body."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        self._num_left = 0  # bytes of this chunk with its line end, or of the complete body

    def feed(self, data: bytes) -> bytes:
        """Returns the body bytes in `data`."""
        self._buffer += data
        if self.status == 0 and not self._read_head():
            return b""
        return self._read_chunks() if self._is_chunked else self._read_length()

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        lines = head.lower().split(b"\r\n")
        self.status = int(lines[0].split(b" ")[1])
        self._is_chunked = b"transfer-encoding: chunked" in lines
        lengths = [line[15:] for line in lines if line.startswith(b"content-length:")]
        self._num_left = int(lengths[0]) if lengths else 0
        self._buffer = rest
        return True

    def _read_length(self) -> bytes:
        body, self._buffer = self._buffer[: self._num_left], self._buffer[self._num_left :]
        self._num_left -= len(body)
        self.is_complete = self._num_left == 0
        return body

    def _read_chunks(self) -> bytes:
        chunks = []
        while not self.is_complete:
            size, end, rest = self._buffer.partition(b"\r\n")
            num_bytes = int(size, 16) if end else 0
            if not end or len(rest) < num_bytes + 2:
                break  # the next data brings the rest of this chunk
            chunks.append(rest[:num_bytes])
            self._buffer = rest[num_bytes + 2 :]
            self.is_complete = num_bytes == 0
        return b"".join(chunks)


class KeepAlive(asyncio.Protocol):
    """A connection that stays open. With `has_quickack` each segment is acknowledged at once, not
    up to 40 ms later.
    """

    def __init__(self, *, has_quickack: bool = True) -> None:
        self._has_quickack = has_quickack and _QUICKACK is not None
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None

    @classmethod
    async def open(cls, url: str, trust: ssl.SSLContext | None = None, **options: Any) -> Self:
        """Opens a connection. `trust`: for HTTPS, the authorities of the system by default.
        `options` are the constructor's. Raises DependencyUnavailable.
        """
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        port = (443 if is_secure else 80) if parts.port is None else parts.port
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: cls(**options),
                parts.hostname or "127.0.0.1",
                port,
                ssl=(trust or True) if is_secure else None,
            )
        except OSError as error:
            raise DependencyUnavailable(f"cannot reach {url}: {error}") from None
        return connection

    @property
    def is_open(self) -> bool:
        """Whether the connection is open: a server may close an idle one."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.acknowledge_quickly()

    def acknowledge_quickly(self) -> None:
        if self._has_quickack:  # the kernel resets it after each use
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


class Connection(KeepAlive):
    """A connection with one request at a time. Each response becomes a Sample."""

    _answer: asyncio.Future[Sample] | None = None

    async def request(self, message: bytes) -> Sample:
        """Sends an HTTP request; returns when its response has ended. Errors are in the Sample."""
        assert self._transport is not None
        self._reader, self._rest, self._last = BodyReader(), b"", b""
        self._arrivals: list[float] = []
        self._answer = asyncio.get_running_loop().create_future()
        self._started = time.perf_counter()
        self._transport.write(message)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.acknowledge_quickly()
        if self._answer is None:
            return
        *events, self._rest = (self._rest + self._reader.feed(data)).split(b"\n\n")
        for event in events:
            if TEXT.search(event):
                self._arrivals.append(now)
            if _USAGE.search(event) or b'"error"' in event:
                self._last = event
        if self._reader.is_complete:
            self._finish(now, "")

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._finish(time.perf_counter(), f"the connection ended: {error}")

    def _finish(self, now: float, error: str) -> None:
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if answer.done():
            return
        if self._reader.status != 200 and not error:
            error = f"status {self._reader.status}: {self._rest.decode(errors='replace')}"
        usage = {} if error else _usage(self._last)
        if not error and not (usage and self._arrivals):
            error = f"no text or no usage: {self._last.decode(errors='replace')}"
        details = usage.get("prompt_tokens_details") or {}
        answer.set_result(
            Sample(
                started=self._started,
                arrivals=tuple(self._arrivals),
                ended=now,
                num_prompt_tokens=usage.get("prompt_tokens", 0),
                num_cached_tokens=details.get("cached_tokens") or 0,
                num_output_tokens=usage.get("completion_tokens", 0),
                error=error,
            )
        )


class ConnectionPool:
    """Connections of one server. Each request takes an idle one, or opens one."""

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._trust = trust
        self._idle: list[Connection] = []

    async def request(self, message: bytes) -> Sample:
        """Sends a request over an idle or a new connection: see `Connection.request`. Raises
        DependencyUnavailable.
        """
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = await Connection.open(self._url, self._trust)
        sample = await connection.request(message)
        if sample.error:
            connection.close()
        else:
            self._idle.append(connection)
        return sample

    def close(self) -> None:
        """Closes the idle ones."""
        while self._idle:
            self._idle.pop().close()


def http_request(url: str, api_key: str, path: str, body: dict[str, Any]) -> bytes:
    payload = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def _usage(event: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(event.partition(b"data:")[2]).get("usage") or {}
    except (AttributeError, *UNREADABLE):
        return {}
