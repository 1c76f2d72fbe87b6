"""Writes one HTTP answer: a body at the end, or server-sent events on the way.

What is in them is the dialect's part (`chat_response.py` and its neighbours). The response starts
with the first piece of the answer, so whatever goes wrong before has a proper HTTP status; what
goes wrong later is an `error` event, after which the stream ends. A client that leaves is noticed
at once, and its request closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from litestar.types import Receive, Scope, Send

from services.gateway.http import sse
from services.gateway.openai.errors import envelope, error_headers
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import OutputDelta
from services.gateway.text.scored_tokens import ScoredToken
from shared.errors import HearthError

_encode = msgspec.json.Encoder().encode
# An answer of more choices is put together on a thread, so that running streams do not wait for it.
MAX_INLINE_RESULTS = 16


@dataclass(slots=True)
class ChoiceResult:
    """All that one choice has told."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str = ""


class EventRenderer(Protocol):
    """What a streamed answer tells, as server-sent events."""

    def events(self, delta: OutputDelta) -> bytes: ...

    def closing(self) -> bytes:
        """After the last piece."""
        ...


# The whole answer, of the results by index. Raises HearthError if it cannot be given.
BodyRenderer = Callable[[list[ChoiceResult]], Any]


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """An ASGI application for one response. `cancel` is called when the client is gone.

    `content`: how the answer is told, as events or as a whole. `headers` go with any outcome.
    """

    merger: OutputMerger
    content: EventRenderer | BodyRenderer
    headers: Mapping[str, str]
    cancel: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if callable(self.content):
                await self._send_body(send, self.content)
            else:
                await self._send_events(send, self.content)
        finally:
            watcher.cancel()
            self.cancel()  # changes nothing after an ending

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    async def _send_body(self, send: Send, body_of: BodyRenderer) -> None:
        try:
            results = await self._results()
            if len(results) > MAX_INLINE_RESULTS:
                body = await asyncio.to_thread(lambda: _encode(body_of(results)))
            else:
                body = _encode(body_of(results))
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

    async def _send_events(self, send: Send, renderer: EventRenderer) -> None:
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
                events = b"".join([renderer.events(delta) for delta in deltas])
                if self.merger.is_complete:  # what ends the answer leaves with its last piece
                    break
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events = b""
                deltas = await self.merger.next()
            ending = events + renderer.closing() + sse.DONE
        except HearthError as error:
            ending = sse.event(envelope(error))
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_error(self, send: Send, error: HearthError) -> None:
        body = _encode(envelope(error))
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
