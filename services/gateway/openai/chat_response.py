"""The response of a chat completion, as a dialect of `http/response.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from services.gateway.http import sse
from services.gateway.http.dialect import ChoiceResult
from services.gateway.http.json_parts import with_list, with_value
from services.gateway.openai.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
)
from services.gateway.openai.errors import OpenAIDialect
from services.gateway.openai.logprobs import ChatLogprobs, chat_logprobs, chat_logprobs_parts
from services.gateway.openai.usage import hearth_info_of, to_usage
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.request_output import OutputDelta
from services.gateway.text.scored_tokens import ScoredToken
from services.gateway.text.token_bytes import TokenBytes

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatRenderer(OpenAIDialect):
    merger: OutputMerger
    token_bytes: TokenBytes
    request_id: str
    model: str
    created: int
    has_usage: bool
    has_logprobs: bool
    _begun: set[int] = field(default_factory=set)  # choices whose role was sent
    _text_events: dict[int, sse.TextEvent] = field(default_factory=dict)  # by choice

    def event(self, delta: OutputDelta) -> bytes:
        """Returns one event per text; a choice's first has the role, its last the finish reason."""
        index, texts = delta.choice_index, list(delta.texts)
        says_more = self.has_logprobs or delta.finish_reason is not None
        first = last = b""
        if index not in self._begun and len(texts) > says_more:
            first = self._event(ChunkChoice(index=index, delta=self._delta(index, texts.pop(0))))
        if says_more:
            choice = ChunkChoice(
                index=index,
                delta=self._delta(index, texts.pop() if texts else None),
                finish_reason=delta.finish_reason,
                logprobs=self._logprobs(delta.tokens) if delta.tokens else None,
            )
            last = self._event(choice)
        return first + self._text_event(index).of(texts) + last

    def closing(self) -> bytes:
        if not self.has_usage:
            return sse.DONE
        outputs = self.merger.outputs
        chunk = ChatCompletionChunk(
            id=f"chatcmpl-{self.request_id}",
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=(),
            usage=to_usage(outputs),
            hearth=hearth_info_of(self.request_id, outputs),
        )
        return sse.event(chunk) + sse.DONE

    def body(self, results: list[ChoiceResult]) -> Iterator[bytes]:
        outputs = self.merger.outputs
        completion = ChatCompletion(
            id=f"chatcmpl-{self.request_id}",
            created=self.created,
            model=self.model,
            choices=[],
            usage=to_usage(outputs),
            hearth=hearth_info_of(self.request_id, outputs),
        )
        return with_list(_encode(completion), b"choices", map(self._choice, results))

    def _choice(self, result: ChoiceResult) -> Iterable[bytes]:
        choice = ChatChoice(
            index=result.index,
            message=AssistantMessage(content=result.text),
            finish_reason=result.finish_reason,
        )
        encoded = _encode(choice)
        if not self.has_logprobs:
            return (encoded,)
        logprobs = chat_logprobs_parts(result.tokens, self.token_bytes)
        return with_value(encoded, b"logprobs", logprobs)

    def _text_event(self, index: int) -> sse.TextEvent:
        known = self._text_events.get(index)
        if known is None:
            known = sse.TextEvent(
                lambda text: self._chunk(ChunkChoice(index=index, delta=Delta(content=text)))
            )
            self._text_events[index] = known
        return known

    def _delta(self, index: int, text: str | None) -> Delta:
        if index in self._begun:
            return Delta(content=text)
        self._begun.add(index)
        return Delta(role="assistant", content=text or "")

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
