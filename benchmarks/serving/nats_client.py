"""A NATS client that only counts events, as `CountingConnection` does over HTTP.

It speaks NATS's protocol itself (https://docs.nats.io/reference/reference-protocols/nats-protocol):
it sends a request with a reply subject, and counts the lines of the messages there until one says
that the response has ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from benchmarks.serving.counting_connection import CountingConnection
from shared.subjects import api_request, client_inbox

_END = re.compile(rb"Hearth-End: (\w+)\r\n")
_TEXT = re.compile(rb'"content":"(?!")')
_NO_RESPONDERS = b"NATS/1.0 503"
_LINE_END = b"}\n"  # end of an event
_SEAM = 64  # bytes of the last data that are searched again


class NatsConnection(CountingConnection):
    """A connection for one request at a time. `number` distinguishes the connections of the
    client.
    """

    def __init__(self, *, client_id: str, password: str, number: int) -> None:
        super().__init__(has_quickack=False)
        self._client_id, self._password = client_id, password
        self._inbox = f"{client_inbox(self._client_id)}{number}"

    @classmethod
    async def to(cls, url: str, number: int) -> Self:
        """Connects to nats://CLIENT:PASSWORD@HOST:PORT, whose client belongs to a tenant."""
        parts = urlsplit(url)
        client_id, password = parts.username or "", parts.password or ""
        return await cls.open(url, client_id=client_id, password=password, number=number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        options = {
            "user": self._client_id,
            "pass": self._password,
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

    def message(self, body: dict[str, Any]) -> bytes:
        payload = msgspec.json.encode(body)
        subject = api_request("chat", self._client_id)
        return f"PUB {subject} {self._inbox} {len(payload)}\r\n".encode() + payload + b"\r\n"

    def data_received(self, data: bytes) -> None:
        if b"PING\r\n" in data:
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
        if self._tail.endswith(b"}") and data.startswith(b"\n"):
            self._num_events += 1
        seam = (self._tail + data)[-_SEAM - len(data) :]
        self._tail = seam[-_SEAM:]
        if _END.search(seam):
            self._ended.set_result(None)
