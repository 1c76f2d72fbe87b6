"""Encodes the response: a message, or the events of its stream.

message_start ping (content_block_start content_block_delta* content_block_stop)* message_delta
message_stop

Blocks never mix. The number of cached tokens is known with the first token, so `message_start`
leaves then; until then a silent stream has comments, and after that pings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from services.gateway.dialects.anthropic.errors import AnthropicErrorEnvelope, envelope, type_of
from services.gateway.dialects.anthropic.request import MessagesRequest
from services.gateway.dialects.anthropic.response_types import (
    AnthropicPing,
    AnthropicStop,
    AnthropicText,
    AnthropicTextDelta,
    AnthropicThinking,
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    HearthWarnings,
    InputJsonDelta,
    MessageDelta,
    MessageResponse,
    MessageStart,
    MessageStop,
    SignatureDelta,
    StopReason,
    StreamEvent,
    ThinkingDelta,
    ToolUse,
)
from services.gateway.dialects.anthropic.signature import Signature
from services.gateway.dialects.anthropic.tools import warnings_of
from services.gateway.dialects.anthropic.turns import external_id
from services.gateway.output import events as output
from services.gateway.output.framing import Framing, TextEvent
from services.gateway.output.results import ChoiceResult, Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.structured.tools.parsing.json_value import json_object
from shared.errors import HearthError

_encode = msgspec.json.Encoder().encode
NO_INPUT = msgspec.Raw(b"{}")  # of a call that begins
STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessageEncoder:
    def __init__(self, context: ResponseContext, warnings: Sequence[str] = ()) -> None:
        """`warnings`: warnings of the request, besides those of the output."""
        self._context = context
        self._warnings = tuple(warnings)
        self._is_begun = False
        self._num_blocks = 0
        self._open: type[Content] | None = None  # the kind of the last block, until it has ended
        self._signature = Signature(context.state or b"")
        self._stop = AnthropicStop("end_turn", None)

    @classmethod
    def of(cls, body: MessagesRequest, context: ResponseContext) -> MessageEncoder:
        return cls(context, warnings_of(body.tools))

    def keep_alive(self) -> bytes:
        """Returns a ping, also before the message begins: Anthropic's clients always skip pings."""
        return self._event(AnthropicPing())

    def events(self, events: Sequence[output.Event]) -> Iterator[bytes]:
        if not self._is_begun:
            self._is_begun = True
            yield self._event(MessageStart(self._message([], None, _usage(self._prompt(), 1))))
            yield self._event(AnthropicPing())
        for event in events:
            yield self._encoded(event)

    def closing(self) -> bytes:
        return b""

    def body(self, results: Results) -> Iterator[bytes]:
        choice = results.choices[0] if results.choices else ChoiceResult(0)
        stop = _stop(choice.finish_reason, choice.stop_sequence)
        yield _encode(self._message(self._content(choice), stop, _usage_of(results.usage)))

    def error_status(self, error: HearthError) -> int:
        return type_of(error).status

    def error_body(self, error: HearthError) -> AnthropicErrorEnvelope:
        return envelope(error, self._context.request_id)

    def error_event(self, error: HearthError) -> bytes:
        return self._context.framing.named("error").event(self.error_body(error))

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────

    def _encoded(self, event: output.Event) -> bytes:
        match event:
            case output.TextDelta():
                texts = [text for text in event.texts if text]
                return self._within(AnthropicText(""), self._texts(texts)) if texts else b""
            case output.ReasoningDelta():
                return self._thinking("".join(event.texts))
            case output.ToolCallStart():
                return self._end() + self._begin(
                    ToolUse(external_id(event.id), event.name, NO_INPUT)
                )
            case output.ToolArgumentsDelta():
                return self._delta(InputJsonDelta(event.text)) if event.text else b""
            case output.ToolCallEnd():
                return self._end()
            case output.Finished():
                self._stop = _stop(event.reason, event.stop_sequence)
                return self._end()
            case output.Usage():
                usage = _usage_of(event)
                end = MessageDelta(self._stop, usage, self._hearth())
                return self._event(end) + self._event(MessageStop())

    def _texts(self, texts: Sequence[str]) -> bytes:
        index = self._num_blocks - (self._open is AnthropicText)
        return _text_event(self._context.framing, index).of(texts)

    def _thinking(self, text: str) -> bytes:
        if not text:
            return b""
        before = (
            b""
            if self._open is AnthropicThinking
            else self._end() + self._begin(AnthropicThinking("", ""))
        )
        self._signature.add(text)
        return before + self._delta(ThinkingDelta(text))

    def _within(self, block: Content, encoded: bytes) -> bytes:
        """Begins a block of this kind, unless the last block is one and has not ended."""
        if self._open is type(block):
            return encoded
        ended = self._end()
        return ended + self._begin(block) + encoded

    def _begin(self, block: Content) -> bytes:
        self._open = type(block)
        self._num_blocks += 1
        return self._event(BlockStart(self._num_blocks - 1, block))

    def _end(self) -> bytes:
        """Ends the last block, if it has not ended."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is AnthropicThinking:
            signed = self._delta(SignatureDelta(self._signature.take()))
        self._open = None
        return signed + self._event(BlockStop(self._num_blocks - 1))

    def _delta(self, delta: ThinkingDelta | SignatureDelta | InputJsonDelta) -> bytes:
        return self._event(BlockDelta(self._num_blocks - 1, delta))

    def _event(self, event: StreamEvent) -> bytes:
        return _event(self._context.framing, event)

    # ── a message ────────────────────────────────────────────────────────────────────────────────

    def _message(
        self, content: list[Content], stop: AnthropicStop | None, usage: AnthropicUsage
    ) -> MessageResponse:
        return MessageResponse(
            id=f"msg_{self._context.request_id}",
            model=self._context.model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=usage,
            hearth=msgspec.UNSET if stop is None else self._hearth(),
        )

    def _content(self, choice: ChoiceResult) -> list[Content]:
        content: list[Content] = []
        text = choice.text
        if choice.reasoning:
            self._signature.add(choice.reasoning)
            content.append(AnthropicThinking(choice.reasoning, self._signature.take()))
        calls = [(each, json_object(each.arguments or "{}")) for each in choice.tool_calls]
        if choice.finish_reason != "length":  # else the last call is cut
            text += "".join(each.arguments for each, found in calls if found is None)
        if text:
            content.append(AnthropicText(text))
        for each, found in calls:
            if found is not None:
                content.append(ToolUse(external_id(each.id), each.name, found))
        return content

    def _hearth(self) -> HearthWarnings | msgspec.UnsetType:
        warnings = (*self._warnings, *self._context.merger.warnings)
        return HearthWarnings(warnings) if warnings else msgspec.UNSET

    def _prompt(self) -> output.Usage:
        """Returns the prompt's part of the usage while the output is not complete."""
        outputs = self._context.merger.outputs
        cached = sum(each.num_cached_tokens or 0 for each in outputs)
        return output.Usage(sum(each.num_prompt_tokens for each in outputs), cached, 0)


def _usage(usage: output.Usage, num_output: int) -> AnthropicUsage:
    cached = usage.cached or 0
    return AnthropicUsage(
        input_tokens=usage.prompt - cached,
        cache_read_input_tokens=cached,
        output_tokens=num_output,
    )


def _usage_of(usage: output.Usage) -> AnthropicUsage:
    return _usage(usage, usage.output)


def _stop(reason: str, sequence: str | None) -> AnthropicStop:
    if reason == "stop" and sequence is not None:
        return AnthropicStop("stop_sequence", sequence)
    return AnthropicStop(STOP_REASONS.get(reason, "end_turn"), None)


def _event(framing: Framing, event: StreamEvent) -> bytes:
    return _named(framing, str(event.__struct_config__.tag)).event(event)


@lru_cache(maxsize=64)
def _named(framing: Framing, name: str) -> Framing:
    return framing.named(name)


@lru_cache(maxsize=64)
def _text_event(framing: Framing, index: int) -> TextEvent:
    """Returns the encoder for the text block at this index, which all responses share."""
    return TextEvent(
        framing.named("content_block_delta"),
        lambda text: BlockDelta(index, AnthropicTextDelta(text)),
    )
