"""The events of one choice that the client has not taken; a backlog is joined."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.gateway.output.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    bytes_of_event,
)
from services.gateway.text.scored_tokens import ScoredTokens

MAX_TEXTS = 64  # of one event; more are joined
MAX_DELTA_TOKENS = 64  # with logprobs, of one event


class _Entry:
    """An event and what was joined to it."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.texts = list(_texts_of(event))
        self.tokens = ScoredTokens()
        self._add_tokens(event)

    def takes(self, event: Event) -> bool:
        if not _joins(self.event, event):
            return False
        num_more = len(event.tokens) if isinstance(event, TextDelta) else 0
        return not num_more or len(self.tokens) + num_more <= MAX_DELTA_TOKENS

    def join(self, event: Event) -> None:
        self.texts += _texts_of(event)
        self._add_tokens(event)

    def joined(self, choice_index: int) -> Event:
        texts = self.texts
        if len(texts) > MAX_TEXTS or self.tokens:
            texts = ["".join(texts)]
        match self.event:
            case TextDelta():
                return TextDelta(choice_index, texts, self.tokens or ())
            case ReasoningDelta():
                return ReasoningDelta(choice_index, texts)
            case ToolArgumentsDelta(index=index):
                return ToolArgumentsDelta(choice_index, index, "".join(texts))
        return msgspec.structs.replace(self.event, choice_index=choice_index)

    def _add_tokens(self, event: Event) -> None:
        if isinstance(event, TextDelta) and event.tokens:
            self.tokens.extend(event.tokens)


class ChoiceEvents:
    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, events: Sequence[Event]) -> int:
        """Returns the bytes that the events take until they are taken."""
        for event in events:
            if self._entries and self._entries[-1].takes(event):
                self._entries[-1].join(event)
            else:
                self._entries.append(_Entry(event))
        return sum(map(bytes_of_event, events))

    def take(self, choice_index: int) -> list[Event]:
        """Returns events with at most MAX_DELTA_TOKENS tokens that have logprobs, or one event."""
        num_taken, num_tokens = 0, 0
        for entry in self._entries:
            num_tokens += len(entry.tokens)
            if num_taken and num_tokens > MAX_DELTA_TOKENS:
                break
            num_taken += 1
        taken, self._entries = self._entries[:num_taken], self._entries[num_taken:]
        return [entry.joined(choice_index) for entry in taken]


def _texts_of(event: Event) -> Sequence[str]:
    match event:
        case TextDelta() | ReasoningDelta():
            return event.texts
        case ToolArgumentsDelta():
            return (event.text,)
    return ()


def _joins(last: Event, event: Event) -> bool:
    match last, event:
        case (TextDelta(), TextDelta()) | (ReasoningDelta(), ReasoningDelta()):
            return True
        case ToolArgumentsDelta(), ToolArgumentsDelta():
            return last.index == event.index
    return False
