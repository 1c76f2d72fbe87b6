"""Writes one HTTP response: a body at the end, or server-sent events as they arrive.

The `Encoder` provides the content. A streamed response starts with the first event, or with a
keep-alive event after `keep_alive_s` of silence. An error before that sets the HTTP status; a later
error is sent as an event and ends the stream. A body is sent when it is complete, so errors always
set the status. When a client disconnects or does not read, its request is cancelled immediately.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain

import msgspec
from litestar.types import Receive, Scope, Send

from services.gateway.http.connection import ClientConnection, connection_of
from services.gateway.output.events import TextDelta
from services.gateway.output.results import Results
from services.gateway.receipts.options import RECEIPT
from services.gateway.request.request_output import ClientDisconnected, ClientSlow
from services.gateway.request.submission import OpenResponse
from services.gateway.tenancy.errors import RateLimited
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import HearthError, NoCapacity, Overloaded

_encode = msgspec.json.Encoder().encode
MIN_PART_BYTES = 64 * 1024  # bytes of a body; smaller bodies are sent at once, with their length
TURN_PARTS = 16  # parts that are encoded at once: 4 ms for lists of small items
KEEP_ALIVE_S = 10.0
DEFAULT_RETRY_AFTER_S = 1.0
JSON = (b"content-type", b"application/json")
EVENTS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes nginx send each event at once
)


def error_headers(error: HearthError) -> dict[str, str]:
    """Returns the rate limit headers, and Retry-After for retryable errors, in whole seconds."""
    headers = dict(error.headers) if isinstance(error, RateLimited) else {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, (NoCapacity, Overloaded)):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return headers


class GenerationResponse:
    """An ASGI application that sends one response and cancels the request when the response ends.
    `keep_alive_s` is the silence after which a stream sends a keep-alive event. If `shows_moves`, a
    stream has a comment `: moved {…}` before the tokens with which another worker continues it. The
    hash of the receipt is a header of a body; a stream that shows it ends with `: receipt …`.
    """

    def __init__(
        self,
        opened: OpenResponse,
        *,
        clock: Clock,
        keep_alive_s: float = KEEP_ALIVE_S,
        shows_moves: bool = False,
    ) -> None:
        self._shows_moves = shows_moves
        self.merger = opened.merger
        self.encoder = opened.encoder
        self.is_streamed = opened.is_streamed
        self.headers = opened.headers
        self._cancel = opened.cancel
        self._receipt_hash = opened.receipt_hash
        self._shows_receipt = opened.shows_receipt
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._sent_at = clock.now()
        self._is_started = False
        self._is_complete = False
        self._sending = asyncio.Lock()  # a keep-alive must not precede the head or follow the end
        self._comments: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        self.merger.unsent.watch(lambda: self._end_large(connection), is_streamed=self.is_streamed)
        watcher = start_awaited(self._watch(receive, connection))
        try:
            if self.is_streamed:
                self._comments = start_awaited(self._keep_alive(send))
                await self._send_events(send, connection)
            else:
                await self._send_body(send, connection)
            await connection.sent()
        finally:
            watcher.cancel()
            self._stop_comments()
            self._cancel(_client_error(connection))  # has no effect on ended requests
            self.merger.close()

    async def _watch(self, receive: Receive, connection: ClientConnection) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel(_client_error(connection))

    def _end_large(self, connection: ClientConnection) -> None:
        """Ends a response that takes too much memory. If it has started, its client
        counts as slow.
        """
        if self.is_streamed or self._is_started:
            connection.abort_slow()
        else:
            error = "the outputs of this tenant that wait to be sent are too large"
            self.merger.fail(Overloaded(error))

    # ── a body ───────────────────────────────────────────────────────────────────────────────────

    async def _send_body(self, send: Send, connection: ClientConnection) -> None:
        try:
            parts = joined_in_turns(self.encoder.body(await self._results()))
            part = await anext(parts)
        except HearthError as error:
            await self._send_error(send, error)
            return
        following = await anext(parts, None)
        headers = (JSON, *self._receipt_headers())
        await self._start(send, 200, headers, len(part) if following is None else None)
        while following is not None and not connection.is_lost:
            await self._send(send, part, more_body=True)
            part, following = following, await anext(parts, None)
        await self._send(send, part, more_body=False)

    async def _results(self) -> Results:
        results = Results()
        while events := await self.merger.next():
            for event in events:
                results.add(event)
                if isinstance(event, TextDelta):
                    self.merger.unsent.add(event.num_bytes)
        return results

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    async def _send_events(self, send: Send, connection: ClientConnection) -> None:
        try:
            events = await self.merger.next()
        except HearthError as error:
            await self._send_early_error(send, error)
            return
        await self._start_events(send)
        ending = b""
        try:
            while events and not connection.is_lost:
                parts = joined(chain(self._moves(), self.encoder.events(events)))
                last = next(parts)
                for following in parts:
                    await self._send(send, last, more_body=True)
                    await asyncio.sleep(0)  # lets other streams continue
                    last = following
                if self.merger.is_complete:  # sent with the end of the stream
                    ending = last
                    break
                await self._send(send, last, more_body=True)
                events = await self.merger.next()
            ending += self._receipt_comment() + self.encoder.closing()
        except HearthError as error:
            ending = self.encoder.error_event(error)
        await self._send(send, ending, more_body=False)

    def _receipt_headers(self) -> Iterator[tuple[bytes, bytes]]:
        if found := self._receipt_hash():
            yield RECEIPT.encode(), found.encode()

    def _receipt_comment(self) -> bytes:
        found = self._receipt_hash() if self._shows_receipt else ""
        return b": receipt %b\n\n" % found.encode() if found else b""

    def _moves(self) -> Iterator[bytes]:
        moves = self.merger.take_moves() if self._shows_moves else ()
        return (b": moved %b\n\n" % _encode(each) for each in moves)

    async def _send_early_error(self, send: Send, error: HearthError) -> None:
        """Sends an error that no output precedes."""
        if self._is_started:
            await self._send(send, self.encoder.error_event(error), more_body=False)
        else:
            await self._send_error(send, error)

    async def _keep_alive(self, send: Send) -> None:
        """Sends a keep-alive event after each silence, until the response is complete: a client may
        take its last bytes long after they were sent.
        """
        while not self._is_complete:
            silent_s = self._clock.now() - self._sent_at
            if silent_s < self._keep_alive_s:
                await self._clock.sleep(self._keep_alive_s - silent_s)
                continue
            await self._start_events(send)
            await self._send(send, self.encoder.keep_alive(), more_body=True)

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _stop_comments(self) -> None:
        """Removes the task: the traceback of its cancellation refers to this response."""
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None

    async def _send_error(self, send: Send, error: HearthError) -> None:
        self._stop_comments()
        self._cancel(error)  # one prompt of several may have failed alone
        body = _encode(self.encoder.error_body(error))
        headers = [JSON]
        headers += [(key.encode(), text.encode()) for key, text in error_headers(error).items()]
        await self._start(send, self.encoder.error_status(error), headers, len(body))
        await self._send(send, body, more_body=False)

    async def _start_events(self, send: Send) -> None:
        if not self._is_started:
            await self._start(send, 200, EVENTS)

    async def _start(
        self,
        send: Send,
        status: int,
        headers: Iterable[tuple[bytes, bytes]],
        length: int | None = None,
    ) -> None:
        self._is_started = True
        headers = [*headers, *((key.encode(), text.encode()) for key, text in self.headers.items())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        async with self._sending:
            await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, send: Send, body: bytes, *, more_body: bool) -> None:
        async with self._sending:
            if self._is_complete:
                return
            self._is_complete = not more_body
            self._sent_at = self._clock.now()
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
            self.merger.on_send(self._sent_at, self._clock.now())


def _client_error(connection: ClientConnection) -> ClientDisconnected:
    if connection.is_slow:
        return ClientSlow("the client did not read its response")
    return ClientDisconnected("the client closed the connection")


async def joined_in_turns(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Joins parts as `joined` does. Other streams continue after each returned part, after
    TURN_PARTS of `parts`, and after an empty one, which has taken long to compute.
    """
    held: list[bytes] = []
    num_bytes = 0
    for number, part in enumerate(parts, 1):
        held.append(part)
        num_bytes += len(part)
        is_full = num_bytes >= MIN_PART_BYTES
        if is_full:
            yield b"".join(held)
            held, num_bytes = [], 0
        if is_full or not part or not number % TURN_PARTS:
            await asyncio.sleep(0)
    yield b"".join(held)


def joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yields parts joined to at least MIN_PART_BYTES, except the last one; yields at least one."""
    joined: list[bytes] = []
    num_bytes = 0
    for part in parts:
        joined.append(part)
        num_bytes += len(part)
        if num_bytes >= MIN_PART_BYTES:
            yield b"".join(joined)
            joined, num_bytes = [], 0
    yield b"".join(joined)
