"""A streaming HTTP client that costs little: one asyncio protocol, and JSON read once a request.

The client shares the machine with the server it measures, so an event is only searched for the mark
of text and given a time; usage is decoded from the last event. TCP_NODELAY and TCP_QUICKACK are
set: delayed acknowledgements would show up as 40 ms gaps of the server's.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from shared.errors import DependencyUnavailable
from shared.transport.wire_errors import UNREADABLE

_TEXT = re.compile(rb'"(?:content|text)":\s*"(?!")')
_USAGE = re.compile(rb'"usage":\s*\{')
_QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it; times in seconds of the client's monotonic clock."""

    started: float
    arrivals: tuple[float, ...]  # of events that carry text
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
        """Seconds a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_output_tokens - 1)


class BodyReader:
    """Cuts an HTTP/1.1 answer, chunked or with a length, into pieces of its body."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        self._num_left = 0  # bytes of this chunk with its line end, or of the whole body

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` brought."""
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
        pieces = []
        while not self.is_complete:
            size, end, rest = self._buffer.partition(b"\r\n")
            num_bytes = int(size, 16) if end else 0
            if not end or len(rest) < num_bytes + 2:
                break  # the next data brings the rest of this chunk
            pieces.append(rest[:num_bytes])
            self._buffer = rest[num_bytes + 2 :]
            self.is_complete = num_bytes == 0
        return b"".join(pieces)


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._answer: asyncio.Future[Sample] | None = None

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Raises DependencyUnavailable."""
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        port = (443 if is_secure else 80) if parts.port is None else parts.port
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                cls, parts.hostname or "127.0.0.1", port, ssl=is_secure or None
            )
        except OSError as error:
            raise DependencyUnavailable(f"cannot reach {url}: {error}") from None
        return connection

    @property
    def is_open(self) -> bool:
        """A server may close a connection that idles."""
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, message: bytes) -> Sample:
        """Sends a whole HTTP request; returns when its answer has ended. Errors are in it."""
        assert self._transport is not None
        self._reader, self._rest, self._last = BodyReader(), b"", b""
        self._arrivals: list[float] = []
        self._answer = asyncio.get_running_loop().create_future()
        self._started = time.perf_counter()
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._acknowledge_quickly()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._acknowledge_quickly()  # the kernel forgets it after each use
        if self._answer is None:
            return
        *events, self._rest = (self._rest + self._reader.feed(data)).split(b"\n\n")
        for event in events:
            if _TEXT.search(event):
                self._arrivals.append(now)
            if _USAGE.search(event) or b'"error"' in event:
                self._last = event
        if self._reader.is_complete:
            self._finish(now, "")

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._finish(time.perf_counter(), f"the connection ended: {error}")

    def _acknowledge_quickly(self) -> None:
        if _QUICKACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

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
