"""The response of a request of the Responses API, streamed or not.

created ──▶ in_progress ──▶ events of items ──▶ completed | incomplete | failed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from services.gateway.dialects.openai.errors import ErrorEnvelope, envelope
from services.gateway.dialects.openai.logprobs import ContentLogprob, chat_logprobs
from services.gateway.dialects.openai.usage import HearthInfo, hearth_info_of
from services.gateway.dialects.responses import items
from services.gateway.dialects.responses import object as objects
from services.gateway.dialects.responses.fields import CompleteRequest
from services.gateway.dialects.responses.ids import response_id
from services.gateway.dialects.responses.items import StreamEvent, name_of
from services.gateway.dialects.responses.output_items import OutputItems
from services.gateway.dialects.responses.storage.record import (
    ResponseRecord,
    TenantState,
    stored_items,
)
from services.gateway.dialects.responses.tools import left_out, namespaces_of
from services.gateway.http.errors import shortened
from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from services.gateway.output.framing import on_one_line
from services.gateway.output.results import ChoiceResult, Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.tenancy.errors import LimitIsZero, RateLimited
from services.gateway.text.scored_tokens import ScoredToken
from shared.errors import GrammarTooComplex, HearthError, Overloaded, PromptTooLong

_encode = msgspec.json.Encoder().encode
DEFAULT_RETRY_S = 1.0
TRUNCATION = "truncation: auto is not supported: a prompt that is too long is rejected"


class ResponsesEncoder:
    """Stores the response when it is complete, if the tenant and the request allow it."""

    def __init__(self, body: CompleteRequest, context: ResponseContext) -> None:
        state: TenantState = TenantState() if context.state is None else context.state
        self._body, self._context = body, context
        self._save = None if body.store is False else state.save
        self._object = objects.new_object(
            body,
            response_id=response_id(context.request_id),
            model=context.model,
            created_at=context.created,
            is_stored=self._save is not None,
        )
        self._items = OutputItems(
            self._object.id,
            namespaces=namespaces_of(body.placed_tools),
            score=self._score,
            seal=state.seal if body.has_sealed_reasoning else None,
        )
        self._encoded = msgspec.Raw(b"")  # the object as it begins
        self._has_begun = False
        self._reason = ""  # why the output ended
        self._delta_of = ""  # the message of `_delta_parts`
        self._delta_parts = (b"", b"", b"")

    def keep_alive(self) -> bytes:
        """Returns the head of the stream if it has not begun: no other event may be its first."""
        return b"".join(self._head()) or self._in_progress()

    def closing(self) -> bytes:
        return b""

    def error_status(self, error: HearthError) -> int:
        return error.http_status

    def error_body(self, error: HearthError) -> ErrorEnvelope:
        return envelope(error)

    def error_event(self, error: HearthError) -> bytes:
        head = b"".join(self._head())
        failed = self._ended(
            "failed",
            error=objects.ErrorDetails(code=_code(error), message=_message(error)),
        )
        event = objects.ResponseFailed(sequence_number=next(self._items.numbers), response=failed)
        return head + self._event(event)

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        yield from self._head()
        for event in events:
            if isinstance(event, TextDelta):
                yield from self._text(event)
            elif isinstance(event, Usage):
                yield self._completed(event)
            else:
                if isinstance(event, Finished):
                    self._reason = event.reason
                yield from map(self._event, self._items.add(event))

    def body(self, results: Results) -> Iterator[bytes]:
        for result in results.choices:
            self._reason = result.finish_reason
            for event in _events_of(result):
                for _ in self._items.add(event):
                    pass
        yield self._stored(self._complete(results.usage))

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────

    def _head(self) -> Iterator[bytes]:
        if self._has_begun:
            return
        self._has_begun = True
        self._encoded = msgspec.Raw(_encode(self._object))
        number = next(self._items.numbers)
        yield self._event(objects.ResponseCreated(sequence_number=number, response=self._encoded))
        yield self._in_progress()

    def _in_progress(self) -> bytes:
        number = next(self._items.numbers)
        event = objects.ResponseInProgress(sequence_number=number, response=self._encoded)
        return self._event(event)

    def _text(self, event: TextDelta) -> Iterator[bytes]:
        yield from map(self._event, self._items.start_message())
        logprobs = self._items.add_text(event.texts, event.tokens)
        if logprobs:
            yield self._event(self._delta(event.text, logprobs))
            return
        if self._delta_of != self._items.open_message:
            self._delta_of = self._items.open_message or ""
            self._delta_parts = self._prepared(self._delta_of)
        head, middle, tail = self._delta_parts
        for text in event.texts:
            number = next(self._items.numbers)
            yield b"%b%d%b%b%b" % (head, number, middle, on_one_line(_encode(text)), tail)

    def _prepared(self, message: str) -> tuple[bytes, bytes, bytes]:
        """Returns the parts of a text's event before its number, before its text, and after it.
        Most events of most responses differ in the number and the text only.
        """
        delta = items.ResponsesTextDelta(
            sequence_number=0,
            item_id=message,
            output_index=self._items.output_index,
            logprobs=[],
            delta="",
        )
        head, number, rest = self._event(delta).partition(b'"sequence_number":0')
        middle, _, tail = rest.rpartition(b'""')
        return head + number[:-1], middle, tail

    def _delta(self, text: str, logprobs: list[ContentLogprob]) -> items.ResponsesTextDelta:
        return items.ResponsesTextDelta(
            sequence_number=next(self._items.numbers),
            item_id=self._items.open_message or "",
            output_index=self._items.output_index,
            logprobs=logprobs,
            delta=text,
        )

    def _event(self, event: StreamEvent) -> bytes:
        framing = self._context.framing
        head = b"event: %b\n" % name_of(event).encode() if framing.before else b""
        return head + framing.event(event)

    # ── its end ──────────────────────────────────────────────────────────────────────────────────

    def _completed(self, usage: Usage) -> bytes:
        made = self._complete(usage)
        self._stored(made)
        of = objects.ResponseIncomplete if made.incomplete_details else objects.ResponseCompleted
        return self._event(of(sequence_number=next(self._items.numbers), response=made))

    def _complete(self, usage: Usage) -> objects.ResponseObject:
        is_cut = self._reason == "length"
        return self._ended(
            "incomplete" if is_cut else "completed",
            incomplete_details=objects.IncompleteDetails() if is_cut else None,
            usage=objects.usage_of(usage),
            completed_at=None if is_cut else int(self._context.now()),
        )

    def _ended(self, status: objects.Status, **changes: object) -> objects.ResponseObject:
        return msgspec.structs.replace(
            self._object,
            status=status,
            output=tuple(self._items.done),
            hearth=self._hearth(),
            **changes,
        )

    def _stored(self, made: objects.ResponseObject) -> bytes:
        """Returns the encoded object, which is stored after the response has left."""
        encoded = _encode(made)
        if self._save is not None:
            body = self._body
            given = body.hearth_input
            self._save(
                ResponseRecord(
                    id=made.id,
                    previous=body.previous_response_id or "",
                    input=stored_items(body.items) if given is msgspec.UNSET else bytes(given),
                    response=encoded,
                )
            )
        return encoded

    def _hearth(self) -> HearthInfo:
        info = hearth_info_of(self._context)
        more = left_out(self._body.placed_tools)
        if self._body.truncation == "auto":
            more = (*more, TRUNCATION)
        if not more:
            return info
        own = () if info.warnings is msgspec.UNSET else info.warnings
        return msgspec.structs.replace(info, warnings=(*own, *more))

    def _score(self, tokens: Sequence[ScoredToken]) -> list[ContentLogprob]:
        if not self._body.has_logprobs:
            return []
        return chat_logprobs(tokens, self._context.token_bytes).content


def _events_of(result: ChoiceResult) -> Iterator[Event]:
    """Returns the events of a complete choice, in the order of its items."""
    index = result.index
    if result.reasoning:
        yield ReasoningDelta(index, result.reasoning_texts)
    if result.text or result.tokens:
        yield TextDelta(index, result.texts, result.tokens)
    for place, call in enumerate(result.tool_calls):
        yield ToolCallStart(index, place, call.id, call.name, is_custom=call.is_custom)
        yield ToolArgumentsDelta(index, place, call.arguments)
        if place + 1 < len(result.tool_calls):
            yield ToolCallEnd(index, place)
    yield Finished(index, "length" if result.finish_reason == "length" else "stop")


def _code(error: HearthError) -> str:
    """Returns the error's code as clients of this API know it."""
    match error:
        case LimitIsZero():
            return "insufficient_quota"
        case RateLimited() | Overloaded():
            return "rate_limit_exceeded"
        case PromptTooLong():
            return "context_length_exceeded"
        case GrammarTooComplex():
            return "invalid_prompt"
    return "server_error"


def _message(error: HearthError) -> str:
    """Returns the message with the time of a retry, which clients read from it."""
    if not isinstance(error, RateLimited | Overloaded):
        return shortened(error.public_message)
    retry_s = DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    return f"{shortened(error.public_message)}. Please try again in {retry_s:.3g}s"
