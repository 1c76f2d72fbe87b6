"""A closed loop of NATS clients that only count events, as `closed_loop.py` over HTTP.

The client speaks NATS's protocol itself (https://docs.nats.io/reference/reference-protocols/
nats-protocol): it sends a request with a reply subject, and counts the lines of the messages there
until one says that the response has ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import msgspec

from benchmarks.serving.closed_loop import Tally, body_of
from services.client.http_client import EventCount
from shared.subjects import api_request, client_inbox

_END = re.compile(rb"Hearth-End: (\w+)\r\n")
_TEXT = re.compile(rb'"content":"(?!")')
_NO_RESPONDERS = b"NATS/1.0 503"
_LINE_END = b"}\n"  # of an event
_SEAM = 64  # bytes of the last data that are searched again


@dataclass(frozen=True)
class NatsTarget:
    """`url`: nats://CLIENT:PASSWORD@HOST:PORT, whose client belongs to a tenant."""

    url: str
    model: str

    @property
    def client_id(self) -> str:
        return urlsplit(self.url).username or ""


class CountingClient(asyncio.Protocol):
    """One request at a time, on a connection of its own."""

    def __init__(self, target: NatsTarget, number: int) -> None:
        self._target = target
        self._inbox = f"{client_inbox(target.client_id)}{number}"
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._seam = b""

    @classmethod
    async def open(cls, target: NatsTarget, number: int) -> CountingClient:
        parts = urlsplit(target.url)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: cls(target, number), parts.hostname, parts.port
        )
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        parts = urlsplit(self._target.url)
        options = {
            "user": parts.username,
            "pass": parts.password,
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "lang": "python",
            "version": "0",
            "protocol": 1,
        }
        self._transport.write(b"CONNECT %b\r\n" % msgspec.json.encode(options))
        self._transport.write(b"SUB %b 1\r\n" % self._inbox.encode())

    async def request(self, prompt: str, num_output_tokens: int) -> EventCount:
        """Returns when the response has ended. Raises ConnectionError."""
        assert self._transport is not None
        payload = msgspec.json.encode(body_of(self._target.model, prompt, num_output_tokens))
        subject = api_request("chat", self._target.client_id).encode()
        self._first_text_at, self._num_events, self._beginning = 0.0, 0, bytearray()
        self._ended = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        head = b"PUB %b %b %d\r\n" % (subject, self._inbox.encode(), len(payload))
        self._transport.write(head + payload + b"\r\n")
        await self._ended
        return EventCount(
            started=started,
            first_text_at=self._first_text_at,
            num_events=self._num_events,
            beginning=bytes(self._beginning),
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if b"PING\r\n" in data and self._transport is not None:
            self._transport.write(b"PONG\r\n")
        if self._ended is None or self._ended.done():
            return
        if _NO_RESPONDERS in data:
            self._ended.set_exception(ConnectionError("no gateway is connected"))
            return
        if not self._first_text_at:
            self._beginning += data
            if _TEXT.search(self._beginning):
                self._first_text_at = time.perf_counter()
        self._num_events += data.count(_LINE_END)
        if self._seam.endswith(b"}") and data.startswith(b"\n"):
            self._num_events += 1
        self._seam = (self._seam + data)[-_SEAM - len(data) :]
        if _END.search(self._seam):
            self._seam = b""
            self._ended.set_result(None)
        else:
            self._seam = self._seam[-_SEAM:]

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the connection ended: {error}"))


async def num_events_of(target: NatsTarget, prompt: str, num_output_tokens: int) -> int:
    """Events of a response, of which one for each token carries text. Raises ValueError if not."""
    connection = await CountingClient.open(target, 0)
    count = await connection.request(prompt, num_output_tokens)
    connection.close()
    if count.num_events < num_output_tokens:
        raise ValueError(f"{count.num_events} events for {num_output_tokens} tokens")
    return count.num_events


async def load(
    target: NatsTarget,
    prompts: Iterator[str],
    *,
    concurrency: int,
    duration_s: float,
    num_output_tokens: int,
    num_events: int,
) -> Tally:
    """Each client sends its next request when the response to the last one has ended."""
    tally = Tally(num_events)
    until = time.perf_counter() + duration_s

    async def client(number: int) -> None:
        connection = await CountingClient.open(target, number)
        try:
            while time.perf_counter() < until:
                tally.record(await connection.request(next(prompts), num_output_tokens))
        except OSError as error:
            tally.faults.append(str(error))
        finally:
            connection.close()

    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return tally
