"""What a request generates, as events without a dialect. No I/O.

choice:    (TextDelta | ReasoningDelta | tool call)* ──▶ Finished
tool call: ToolCallStart ──▶ ToolArgumentsDelta+ ──▶ ToolCallEnd
response:  the events of all its choices, mixed ──▶ Usage
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from services.gateway.text.scored_tokens import ScoredToken, ScoredTokens

TEXT_BYTES = 56  # of a Python string, besides its characters

EndReason = Literal["stop", "length", "tool_calls"]


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    """`texts`: one per token, or joined. `tokens`: the tokens of the text, if logprobs were
    requested.
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
    """`index`: of the call within its choice. `is_custom`: its arguments are `{"input": …}`."""

    choice_index: int
    index: int
    id: str
    name: str
    is_custom: bool = False


class ToolArgumentsDelta(msgspec.Struct, frozen=True, tag=True):
    """`text`: a part of the arguments' JSON."""

    choice_index: int
    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag=True):
    choice_index: int
    index: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last event of a choice. `stop_sequence`: the stop string that ended it."""

    choice_index: int
    reason: EndReason
    stop_sequence: str | None = None


class Usage(msgspec.Struct, frozen=True, tag=True):
    """Tokens of a response. `prompt`: each prompt once, however many choices it has. `cached`: None
    if a stop string ended the request before its worker reported the number. `reasoning`: the part
    of `output` that is reasoning.
    """

    prompt: int
    cached: int | None
    output: int
    reasoning: int = 0


Event = (
    TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd | Finished | Usage
)


def bytes_of_event(event: Event) -> int:
    """Bytes of its text and packed logprobs."""
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
    """Returns each text together with its choice's end if that follows at once, so that one chunk
    can hold both; all other events alone.
    """
    if len(events) == 1:  # as nearly always: one token
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
