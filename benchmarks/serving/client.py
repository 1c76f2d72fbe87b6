"""A client that costs as little as it can: it shares the machine with what it measures.

Raw asyncio protocols over keep-alive connections, one request each at a time. Events are counted by
their blank lines, and parsed only where that is asked for and in the first answer, which shows how
many events of an answer carry text; every other answer must have as many events.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from services.client.http_client import http_request

_TEXT = re.compile(rb'"(?:content|text)":\s*"(?!")')
_EVENT = re.compile(rb"data: (\{[^\n]*\})\n\n")
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True)
class Manner:
    """`has_quickack`: acknowledge each segment at once, not up to 40 ms later. `parses`: reads the
    JSON of every event, as an application's client does.
    """

    has_quickack: bool = False
    parses: bool = False


@dataclass(frozen=True)
class Target:
    url: str
    api_key: str
    model: str

    def request(self, prompt: str, num_output_tokens: int) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return http_request(self.url, self.api_key, "/v1/chat/completions", body)


@dataclass
class Tally:
    """What the clients of one load saw; times in seconds."""

    num_events: int  # of each answer
    ttft_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    faults: list[str] = field(default_factory=list)


class Connection(asyncio.Protocol):
    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, url: str, manner: Manner) -> Connection:
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(manner), parts.hostname, parts.port
        )
        return connection

    async def ask(self, request: bytes) -> None:
        """Returns when the answer has ended; then the fields below tell of it."""
        assert self._transport is not None
        self.started = time.perf_counter()
        self.first_text_at = 0.0
        self.num_events = 0
        self.received = bytearray()
        self._tail = b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        self._acknowledge()

    def data_received(self, data: bytes) -> None:
        self._acknowledge()
        if not self.first_text_at:  # the head and the first event may come apart
            self.received += data
            if _TEXT.search(self.received):
                self.first_text_at = time.perf_counter()
        if self._manner.parses:
            for event in _EVENT.findall(data):
                json.loads(event)
        self.num_events += data.count(b"\n\n")
        if self._tail.endswith(b"\n") and data.startswith(b"\n"):
            self.num_events += 1
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ConnectionError(f"the connection ended: {error}"))

    def _acknowledge(self) -> None:
        if self._manner.has_quickack:  # the kernel forgets it after each use
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _end(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)


async def num_events_of(target: Target, prompt: str, num_output_tokens: int) -> int:
    """Events of an answer, of which one for each token carries text. Raises ValueError if not."""
    reader, writer = await asyncio.open_connection(*_address(target.url))
    writer.write(target.request(prompt, num_output_tokens))
    answer = b""
    while not answer.endswith(_LAST_CHUNK):
        data = await reader.read(65536)
        is_refused = not answer and not data.startswith(b"HTTP/1.1 200")
        if not data or is_refused:
            raise ValueError(f"{target.url} does not answer: {answer + data!r}")
        answer += data
    writer.close()
    events = answer.split(b"\n\n")[:-1]
    num_texts = sum(_TEXT.search(event) is not None for event in events)
    if num_texts != num_output_tokens:
        raise ValueError(f"{num_texts} events with text for {num_output_tokens} tokens")
    return len(events)


async def load(
    target: Target,
    prompts: Iterator[str],
    *,
    concurrency: int,
    duration_s: float,
    num_output_tokens: int,
    num_events: int,
    manner: Manner,
) -> Tally:
    """A closed loop: each client asks again when its answer has ended."""
    tally = Tally(num_events)
    until = time.perf_counter() + duration_s

    async def converse() -> None:
        connection = await Connection.open(target.url, manner)
        try:
            while time.perf_counter() < until:
                await connection.ask(target.request(next(prompts), num_output_tokens))
                _record(tally, connection)
        except OSError as error:
            tally.faults.append(str(error))
        finally:
            connection.close()

    await asyncio.gather(*(converse() for _ in range(concurrency)))
    return tally


def _record(tally: Tally, connection: Connection) -> None:
    if connection.num_events == tally.num_events:
        tally.num_requests += 1
        tally.ttft_s.append(connection.first_text_at - connection.started)
    else:
        told = bytes(connection.received[:300])
        tally.faults.append(f"{connection.num_events} of {tally.num_events} events: {told!r}")


def _address(url: str) -> tuple[Any, Any]:
    parts = urlsplit(url)
    return parts.hostname, parts.port
