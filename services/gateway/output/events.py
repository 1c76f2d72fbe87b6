"""The events that a request generates, independent of dialects. No I/O.

choice:    (TextDelta | ReasoningDelta | tool call)* ──▶ Finished
tool call: ToolCallStart ──▶ ToolArgumentsDelta+ ──▶ ToolCallEnd
response:  the events of all its choices, mixed ──▶ Usage
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from services.gateway.text.scored_tokens import ScoredToken, ScoredTokens

TEXT_BYTES = 56  # the size of a Python string without its characters

EndReason = Literal["stop", "length", "tool_calls"]


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    """A part of a choice's content. `texts` has one text per token, or joined ones. `tokens` are
    the tokens of the text if logprobs were requested.
    """

    choice_index: int
    texts: Sequence[str]
    tokens: Sequence[ScoredToken] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_bytes(self) -> int:
        return bytes_of_texts(self.texts) + bytes_of_tokens(self.tokens)


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    choice_index: int
    texts: Sequence[str]


class ToolCallStart(msgspec.Struct, frozen=True, tag=True):
    """The start of a tool call. `index` is its number within its choice. A custom tool's arguments
    are `{"input": …}`.
    """

    choice_index: int
    index: int
    id: str
    name: str
    is_custom: bool = False


class ToolArgumentsDelta(msgspec.Struct, frozen=True, tag=True):
    """A part of a tool call. `text` is a part of the arguments' JSON."""

    choice_index: int
    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag=True):
    choice_index: int
    index: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last event of a choice. `stop_sequence` is the stop string that ended it, or None."""

    choice_index: int
    reason: EndReason
    stop_sequence: str | None = None


class Usage(msgspec.Struct, frozen=True, tag=True):
    """The token counts of a response. `prompt` counts each prompt once, however many choices it
    has. `cached` is None if a stop string ended the request before its worker reported the number.
    `reasoning` is the part of `output` that is reasoning.
    """

    prompt: int
    cached: int | None
    output: int
    reasoning: int = 0


Event = (
    TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd | Finished | Usage
)


def bytes_of_event(event: Event) -> int:
    """Returns the bytes of the event's text and packed logprobs."""
    match event:
        case TextDelta():
            return event.num_bytes
        case ReasoningDelta():
            return bytes_of_texts(event.texts)
        case ToolCallStart():
            return bytes_of_texts((event.id, event.name))
        case ToolArgumentsDelta():
            return bytes_of_texts((event.text,))
    return 0


def with_ends(events: Sequence[Event]) -> Iterable[tuple[Event, Finished | None]]:
    """Yields each text with the Finished event of its choice if that follows immediately, so that
    one chunk can hold both, and each other event with None.
    """
    if len(events) == 1:  # the usual case: one token
        return ((events[0], None),)
    return _paired(events)


def _paired(events: Sequence[Event]) -> Iterator[tuple[Event, Finished | None]]:
    text: TextDelta | None = None
    for event in events:
        if text is not None:
            is_end = isinstance(event, Finished) and event.choice_index == text.choice_index
            yield text, event if is_end else None  # type: ignore[misc]  # narrowed by `is_end`
            text = None
            if is_end:
                continue
        if isinstance(event, TextDelta):
            text = event
        else:
            yield event, None
    if text is not None:
        yield text, None


def bytes_of_texts(texts: Sequence[str]) -> int:
    return sum(map(len, texts)) + TEXT_BYTES * len(texts)


def bytes_of_tokens(tokens: Sequence[ScoredToken]) -> int:
    return tokens.num_bytes if isinstance(tokens, ScoredTokens) else 0
