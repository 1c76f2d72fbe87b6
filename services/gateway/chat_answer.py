"""The answer of a chat completion, as `answer.py` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from services.gateway import sse
from services.gateway.answer import ChoiceResult
from services.gateway.delivery import Piece
from services.gateway.gathering import Gathering
from services.gateway.openai_chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
)
from services.gateway.openai_logprobs import ChatLogprobs, chat_logprobs
from services.gateway.openai_usage import hearth_info_of, usage_of
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`answer.Events`, and with `body` an `answer.Whole`."""

    gathering: Gathering
    token_bytes: TokenBytes
    request_id: str
    model: str
    created: int
    has_usage: bool
    has_logprobs: bool
    _text_events: dict[int, sse.TextEvent] = field(default_factory=dict)  # by choice

    def opening(self) -> bytes:
        delta = Delta(role="assistant", content="")
        indexes = range(self.gathering.num_choices)
        return b"".join(self._event(ChunkChoice(index=index, delta=delta)) for index in indexes)

    def events(self, piece: Piece) -> bytes:
        events, index = b"", piece.choice_index
        if self.has_logprobs and (piece.texts or piece.tokens):
            choice = self._told(index, piece.text)
            logprobs = self._logprobs(piece.tokens)
            events = self._event(msgspec.structs.replace(choice, logprobs=logprobs))
        elif piece.texts:
            events = self._text_event(index).of(piece.texts)
        if piece.finish_reason is not None:
            ending = ChunkChoice(index=index, delta=Delta(), finish_reason=piece.finish_reason)
            events += self._event(ending)
        return events

    def closing(self) -> bytes:
        if not self.has_usage:
            return b""
        deliveries = self.gathering.deliveries
        chunk = ChatCompletionChunk(
            id=f"chatcmpl-{self.request_id}",
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=(),
            usage=usage_of(deliveries),
            hearth=hearth_info_of(self.request_id, deliveries),
        )
        return sse.event(chunk)

    def body(self, results: list[ChoiceResult]) -> ChatCompletion:
        deliveries = self.gathering.deliveries
        return ChatCompletion(
            id=f"chatcmpl-{self.request_id}",
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=each.index,
                    message=AssistantMessage(content=each.text),
                    finish_reason=each.finish_reason,
                    logprobs=self._logprobs(each.tokens),
                )
                for each in results
            ],
            usage=usage_of(deliveries),
            hearth=hearth_info_of(self.request_id, deliveries),
        )

    def _text_event(self, index: int) -> sse.TextEvent:
        known = self._text_events.get(index)
        if known is None:
            known = sse.TextEvent(lambda text: self._chunk(self._told(index, text)))
            self._text_events[index] = known
        return known

    def _told(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(content=text))

    def _event(self, choice: ChunkChoice) -> bytes:
        return sse.event(self._chunk(choice))

    def _chunk(self, choice: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=f"chatcmpl-{self.request_id}",
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=(choice,),
        )

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.token_bytes) if self.has_logprobs else None
