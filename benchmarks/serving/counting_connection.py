"""An HTTP connection that only counts the events of a response."""

from __future__ import annotations

import asyncio
import json
import re
import time

import msgspec

from services.client.http_client import TEXT, KeepAlive

_EVENT = re.compile(rb"data: (\{[^\n]*\})\n\n")
_LAST_CHUNK = b"0\r\n\r\n"


class EventCount(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed response; times in seconds of the client's monotonic clock."""

    started: float
    first_text_at: float
    num_events: int
    beginning: bytes  # the response's first bytes, at least to its first text


class CountingConnection(KeepAlive):
    """A connection that counts the events of a chunked response by their blank lines.

    Subclasses may count the events of another protocol. If it `parses`, it decodes the JSON of
    every event, as an application's client does.
    """

    def __init__(self, *, has_quickack: bool = True, parses: bool = False) -> None:
        super().__init__(has_quickack=has_quickack)
        self._parses = parses
        self._ended: asyncio.Future[None] | None = None

    async def request(self, message: bytes) -> EventCount:
        """Returns when the response has ended. Raises ConnectionError."""
        assert self._transport is not None
        self._first_text_at, self._num_events = 0.0, 0
        self._beginning, self._tail, self._unparsed = bytearray(), b"", b""
        self._ended = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(message)
        await self._ended
        return EventCount(
            started=started,
            first_text_at=self._first_text_at,
            num_events=self._num_events,
            beginning=bytes(self._beginning),
        )

    def data_received(self, data: bytes) -> None:
        self.acknowledge_quickly()
        if not self._first_text_at:  # the head and the first event may arrive apart
            self._beginning += data
            if TEXT.search(self._beginning):
                self._first_text_at = time.perf_counter()
        if self._parses:
            events, end, self._unparsed = (self._unparsed + data).rpartition(b"\n\n")
            for event in _EVENT.findall(events + end):
                json.loads(event)
        self._num_events += data.count(b"\n\n")
        if self._tail.endswith(b"\n") and data.startswith(b"\n"):
            self._num_events += 1
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the connection ended: {error}"))


def text_events(response: bytes) -> tuple[int, int]:
    """Returns the number of events of a streamed response, and of events that carry text."""
    events = response.split(b"\n\n")[:-1]
    return len(events), sum(TEXT.search(event) is not None for event in events)
