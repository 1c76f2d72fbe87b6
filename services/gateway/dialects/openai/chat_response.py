"""Encodes the response of a chat completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from services.gateway.dialects.openai.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChunkChoice,
    Delta,
    MessageToolCall,
)
from services.gateway.dialects.openai.errors import OpenAIEncoder
from services.gateway.dialects.openai.logprobs import (
    ChatLogprobs,
    chat_logprobs,
    chat_logprobs_parts,
)
from services.gateway.dialects.openai.tool_calls import ToolCallDeltas, message_tool_call
from services.gateway.dialects.openai.usage import (
    ending,
    hearth_info_of,
    to_usage,
    usage_so_far,
)
from services.gateway.http.json_parts import with_list, with_value
from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    with_ends,
)
from services.gateway.output.framing import TextEvent
from services.gateway.output.results import ChoiceResult, Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.text.scored_tokens import ScoredToken

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatEncoder(OpenAIEncoder):
    has_usage: bool
    has_logprobs: bool
    has_running_usage: bool = False
    _begun: set[int] = field(default_factory=set)  # choices whose role was sent
    _calls: dict[int, ToolCallDeltas] = field(default_factory=dict)  # by choice
    _text_events: dict[int, TextEvent] = field(default_factory=dict)  # by choice

    @classmethod
    def of(cls, body: ChatCompletionRequest, context: ResponseContext) -> ChatEncoder:
        return cls(
            context,
            has_usage=body.has_usage,
            has_logprobs=bool(body.logprobs),
            has_running_usage=body.has_running_usage,
        )

    def keep_alive(self) -> bytes:
        return self.context.framing.event(self._empty_chunk())

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns one chunk per text; a choice's first has the role, its last the finish reason."""
        for event, end in with_ends(events):
            ended = event if isinstance(event, Finished) else end
            if ended is not None:
                yield self._rest_of_calls(ended.choice_index)
            match event:
                case TextDelta():
                    reason = None if end is None else end.reason
                    yield self._texts(event.choice_index, event.texts, event.tokens, reason)
                case Finished():
                    yield self._texts(event.choice_index, (), (), event.reason)
                case Usage():
                    yield self._ending(event)
                case _:
                    yield self._other(event)

    def body(self, results: Results) -> Iterator[bytes]:
        completion = ChatCompletion(
            id=self._id,
            created=self.context.created,
            model=self.context.model,
            choices=[],
            usage=to_usage(results.usage),
            hearth=hearth_info_of(self.context),
        )
        return with_list(_encode(completion), b"choices", map(self._choice, results.choices))

    def _texts(
        self,
        index: int,
        all_texts: Sequence[str],
        tokens: Sequence[ScoredToken],
        finish_reason: str | None,
    ) -> bytes:
        texts = list(all_texts)
        says_more = self.has_logprobs or finish_reason is not None
        first = last = b""
        if index not in self._begun and len(texts) > says_more:
            first = self._event(index, self._delta(index, content=texts.pop(0)))
        if says_more:
            choice = ChunkChoice(
                index=index,
                delta=self._delta(index, content=texts.pop() if texts else None),
                finish_reason=finish_reason,
                logprobs=self._logprobs(tokens) if tokens else None,
            )
            last = self.context.framing.event(self._chunk(choice))
        return first + self._plain_texts(index, texts) + last

    def _plain_texts(self, index: int, texts: Sequence[str]) -> bytes:
        if not self.has_running_usage:
            return self._text_event(index).of(texts)
        return self._event(index, Delta(content="".join(texts))) if texts else b""

    def _other(
        self, event: ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
    ) -> bytes:
        index = event.choice_index
        if isinstance(event, ReasoningDelta):
            return self._event(index, self._delta(index, reasoning="".join(event.texts)))
        call = self._calls.setdefault(index, ToolCallDeltas()).of(event)
        return b"" if call is None else self._event(index, self._delta(index, tool_call=call))

    def _rest_of_calls(self, index: int) -> bytes:
        known = self._calls.get(index)
        calls = () if known is None else known.rest()
        return b"".join(self._event(index, self._delta(index, tool_call=each)) for each in calls)

    def _ending(self, usage: Usage) -> bytes:
        chunk = msgspec.structs.replace(self._chunk(), usage=to_usage(usage))
        return ending(self.context, chunk if self.has_usage else None, self._empty_chunk())

    def _empty_chunk(self) -> ChatCompletionChunk:
        return self._chunk(ChunkChoice(index=0, delta=Delta()))

    def _choice(self, result: ChoiceResult) -> Iterable[bytes]:
        choice = ChatChoice(
            index=result.index, message=_message(result), finish_reason=result.finish_reason
        )
        encoded = _encode(choice)
        if not self.has_logprobs:
            return (encoded,)
        logprobs = chat_logprobs_parts(result.tokens, self.context.token_bytes)
        return with_value(encoded, b"logprobs", logprobs)

    def _text_event(self, index: int) -> TextEvent:
        known = self._text_events.get(index)
        if known is None:
            known = TextEvent(
                self.context.framing,
                lambda text: self._chunk(ChunkChoice(index=index, delta=Delta(content=text))),
            )
            self._text_events[index] = known
        return known

    def _delta(
        self,
        index: int,
        *,
        content: str | None = None,
        reasoning: str | None = None,
        tool_call: MessageToolCall | None = None,
    ) -> Delta:
        is_first = index not in self._begun
        self._begun.add(index)
        return Delta(
            role="assistant" if is_first else None,
            content=content or "" if is_first else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=None if tool_call is None else [tool_call],
        )

    def _event(self, index: int, delta: Delta) -> bytes:
        return self.context.framing.event(self._chunk(ChunkChoice(index=index, delta=delta)))

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self.context.created,
            model=self.context.model,
            choices=choices,
            usage=usage_so_far(
                self.context, is_asked=self.has_usage, is_running=self.has_running_usage
            ),
        )

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.context.token_bytes) if self.has_logprobs else None

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.context.request_id}"


def _message(result: ChoiceResult) -> AssistantMessage:
    calls, reasoning = result.tool_calls, result.reasoning
    return AssistantMessage(
        content=(result.text or None) if calls else result.text,
        reasoning_content=reasoning or msgspec.UNSET,
        reasoning=reasoning or msgspec.UNSET,
        tool_calls=[message_tool_call(each) for each in calls] if calls else msgspec.UNSET,
    )
