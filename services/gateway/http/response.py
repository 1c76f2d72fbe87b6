"""Writes one HTTP response: a body at the end, or server-sent events as deltas arrive.

The `Dialect` provides the content. The response starts with the first delta, so an error before
that delta sets the HTTP status; a later error is sent as an event and ends the stream. When a
client disconnects, its request is cancelled immediately.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from litestar.types import Receive, Scope, Send

from services.gateway.http.dialect import ChoiceResult, Dialect
from services.gateway.request.output_merger import OutputMerger
from services.gateway.tenancy.errors import RateLimited
from shared.errors import HearthError, NoCapacity, Overloaded

_encode = msgspec.json.Encoder().encode
# A response with more choices is built on a thread, so that running streams do not wait.
MAX_INLINE_RESULTS = 16
DEFAULT_RETRY_AFTER_S = 1.0


def error_headers(error: HearthError) -> dict[str, str]:
    """Rate limit headers, and Retry-After for retryable errors, in whole seconds, rounded up."""
    headers = dict(error.headers) if isinstance(error, RateLimited) else {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, (NoCapacity, Overloaded)):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return headers


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """An ASGI application for one response. Calls `cancel` when the client disconnects.

    Successes and errors both have `headers`.
    """

    merger: OutputMerger
    dialect: Dialect
    is_streamed: bool
    headers: Mapping[str, str]
    cancel: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(send) if self.is_streamed else self._send_body(send))
        finally:
            watcher.cancel()
            self.cancel()  # no effect on ended requests

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    async def _send_body(self, send: Send) -> None:
        try:
            results = await self._results()
            if len(results) > MAX_INLINE_RESULTS:
                body = await asyncio.to_thread(lambda: _encode(self.dialect.body(results)))
            else:
                body = _encode(self.dialect.body(results))
        except HearthError as error:
            await self._send_error(send, error)
            return
        await self._start(send, 200, [(b"content-type", b"application/json")], len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _results(self) -> list[ChoiceResult]:
        results: dict[int, ChoiceResult] = {}
        texts: dict[int, list[str]] = {}
        while deltas := await self.merger.next():
            for delta in deltas:
                index = delta.choice_index
                result = results.setdefault(index, ChoiceResult(index))
                texts.setdefault(index, []).extend(delta.texts)
                result.tokens += delta.tokens
                if delta.finish_reason is not None:
                    result.finish_reason = delta.finish_reason
        for index, result in results.items():
            result.text = "".join(texts[index])
        return [results[index] for index in sorted(results)]

    async def _send_events(self, send: Send) -> None:
        try:
            deltas = await self.merger.next()
        except HearthError as error:
            await self._send_error(send, error)
            return
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._start(send, 200, headers)
        events = b""
        try:
            while deltas:
                events = b"".join([self.dialect.event(delta) for delta in deltas])
                if self.merger.is_complete:  # send the closing events with the last delta
                    break
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events = b""
                deltas = await self.merger.next()
            ending = events + self.dialect.closing()
        except HearthError as error:
            ending = self.dialect.error_event(error)
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_error(self, send: Send, error: HearthError) -> None:
        body = _encode(self.dialect.error_body(error))
        headers = [(b"content-type", b"application/json")]
        headers += [(key.encode(), text.encode()) for key, text in error_headers(error).items()]
        await self._start(send, error.http_status, headers, len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(
        self, send: Send, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None
    ) -> None:
        headers = [*headers, *((key.encode(), text.encode()) for key, text in self.headers.items())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
