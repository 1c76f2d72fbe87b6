"""Writes the answer of one chat completion: a body at the end, or server-sent events on the way.

The response starts with the first piece of the answer, so whatever goes wrong before has a proper
HTTP status; what goes wrong later is an `error` event, after which the stream ends. A client that
leaves is noticed at once, and its request closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from litestar.types import Receive, Scope, Send

from services.gateway.delivery import Delivery, Piece
from services.gateway.openai_chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
    hearth_info_of,
    usage_of,
)
from services.gateway.openai_errors import envelope, error_headers
from shared.errors import HearthError

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An ASGI application for one response. `leave` is called when the client is gone."""

    delivery: Delivery
    model: str
    created: int
    is_stream: bool
    has_usage: bool
    leave: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(send) if self.is_stream else self._send_body(send))
        finally:
            watcher.cancel()
            self.leave()  # changes nothing after an ending

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    async def _send_body(self, send: Send) -> None:
        texts: dict[int, list[str]] = {}
        reasons: dict[int, str] = {}
        try:
            while pieces := await self.delivery.next():
                for piece in pieces:
                    texts.setdefault(piece.choice_index, []).append(piece.text)
                    if piece.finish_reason is not None:
                        reasons[piece.choice_index] = piece.finish_reason
        except HearthError as error:
            await self._send_error(send, error)
            return
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content="".join(texts[index])),
                finish_reason=reasons[index],
            )
            for index in sorted(texts)
        ]
        body = _encode(self._completion(choices))
        await self._start(send, 200, [(b"content-type", b"application/json")], len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        try:
            pieces = await self.delivery.next()
        except HearthError as error:
            await self._send_error(send, error)
            return
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._start(send, 200, headers)
        opening = [ChunkChoice(index=0, delta=Delta(role="assistant", content=""))]
        events = self._event(opening)
        try:
            while pieces:
                await _send_part(send, events + self._piece_events(pieces))
                events = b""
                pieces = await self.delivery.next()
            ending = events + self._usage_event() + _DONE
        except HearthError as error:
            ending = b"data: " + _encode(envelope(error)) + b"\n\n"
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    def _piece_events(self, pieces: Sequence[Piece]) -> bytes:
        events = b""
        for piece in pieces:
            if piece.text:
                delta = Delta(content=piece.text)
                events += self._event([ChunkChoice(index=piece.choice_index, delta=delta)])
            if piece.finish_reason is not None:
                choice = ChunkChoice(
                    index=piece.choice_index, delta=Delta(), finish_reason=piece.finish_reason
                )
                events += self._event([choice])
        return events

    def _event(self, choices: list[ChunkChoice]) -> bytes:
        return b"data: " + _encode(self._chunk(choices)) + b"\n\n"

    def _usage_event(self) -> bytes:
        if not self.has_usage:
            return b""
        chunk = msgspec.structs.replace(
            self._chunk([]), usage=usage_of(self.delivery), hearth=hearth_info_of(self.delivery)
        )
        return b"data: " + _encode(chunk) + b"\n\n"

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=f"chatcmpl-{self.delivery.request_id}",
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
        )

    def _completion(self, choices: list[ChatChoice]) -> ChatCompletion:
        return ChatCompletion(
            id=f"chatcmpl-{self.delivery.request_id}",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(self.delivery),
            hearth=hearth_info_of(self.delivery),
        )

    async def _send_error(self, send: Send, error: HearthError) -> None:
        body = _encode(envelope(error))
        headers = [(b"content-type", b"application/json")]
        headers += [(key.encode(), text.encode()) for key, text in error_headers(error).items()]
        await self._start(send, error.http_status, headers, len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(
        self, send: Send, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None
    ) -> None:
        headers = [*headers, (b"x-request-id", self.delivery.request_id.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
