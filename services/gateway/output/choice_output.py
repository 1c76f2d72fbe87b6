"""The buffered output of one choice that its response has not written yet; a backlog is joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from services.gateway.output.events import (
    TEXT_BYTES,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    bytes_of_event,
    bytes_of_tokens,
)
from services.gateway.text.scored_tokens import ScoredToken, ScoredTokens

MAX_TEXTS = 64  # an event's texts; more are joined
MAX_DELTA_TOKENS = 64  # an event's tokens with logprobs: up to 130 KiB with 20 top tokens each

Part = str | Event  # content, or another event of a choice


class _Run:
    """Content, or (with `event`) another event and the events that were joined to it."""

    __slots__ = ("event", "texts", "tokens")

    def __init__(self, event: Event | None = None) -> None:
        self.event = event
        self.texts: list[str] = []
        self.tokens: ScoredTokens | None = None  # None without logprobs

    def __bool__(self) -> bool:
        return self.event is not None or bool(self.texts) or self.tokens is not None


class ChoiceOutput:
    """Buffers the events of one choice. Each event that it returns has at most MAX_DELTA_TOKENS
    tokens with logprobs, and their text.
    """

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()  # runs before `_content`
        self._content = _Run()  # the last run
        self._num_taken_chars = 0  # characters of content with logprobs

    def __bool__(self) -> bool:
        return bool(self._runs or self._content)

    def add(self, parts: Sequence[Part], tokens: Sequence[ScoredToken] = ()) -> int:
        """Buffers parts, and `tokens`, whose text is shown with the last part. Returns the bytes
        that they occupy until `take` returns them.
        """
        num_bytes = 0
        for part in parts:
            if isinstance(part, str):
                self._content.texts.append(part)
                num_bytes += TEXT_BYTES + len(part)
            else:
                self._add_event(part)
                num_bytes += bytes_of_event(part)
        if tokens:
            if self._content.tokens is None:
                self._content.tokens = ScoredTokens()
            self._content.tokens.extend(tokens)
            num_bytes += bytes_of_tokens(tokens)
        return num_bytes

    def take(self, choice_index: int) -> list[Event]:
        """Removes and returns events with at most MAX_DELTA_TOKENS tokens together."""
        events: list[Event] = []
        num_tokens, runs = 0, self._runs
        while runs or self._content:
            run = runs[0] if runs else self._content
            if run.tokens is not None:
                num_tokens += len(run.tokens)
                if num_tokens > MAX_DELTA_TOKENS and events:
                    break
                if num_tokens > MAX_DELTA_TOKENS:
                    return [self._take_part(choice_index, run, run.tokens)]
            events.append(self._take_run(choice_index, run))
            if runs:
                runs.popleft()
        return events

    def _add_event(self, event: Event) -> None:
        if self._content:
            self._runs.append(self._content)
            self._content = _Run()
        if not self._runs or not _joins(self._runs[-1].event, event):
            self._runs.append(_Run(event))
        match event:
            case ReasoningDelta():
                self._runs[-1].texts += event.texts
            case ToolArgumentsDelta():
                self._runs[-1].texts.append(event.text)

    def _take_run(self, choice_index: int, run: _Run) -> Event:
        """Removes the run's content and returns it as one event. The texts of tokens with logprobs
        are joined, since one delta holds these tokens together.
        """
        texts, run.texts = run.texts, []
        tokens: Sequence[ScoredToken] = ()
        if run.tokens is not None:
            tokens, run.tokens = run.tokens, None
            self._num_taken_chars += sum(map(len, texts))
        if tokens or len(texts) > MAX_TEXTS:
            texts = ["".join(texts)]
        match run.event:
            case None:
                return TextDelta(choice_index, texts, tokens)
            case ReasoningDelta():
                return ReasoningDelta(choice_index, texts)
            case ToolArgumentsDelta(index=index):
                return ToolArgumentsDelta(choice_index, index, "".join(texts))
        return msgspec.structs.replace(run.event, choice_index=choice_index)

    def _take_part(self, choice_index: int, run: _Run, buffered: ScoredTokens) -> TextDelta:
        tokens, rest = buffered[:MAX_DELTA_TOKENS], buffered[MAX_DELTA_TOKENS:]
        text = "".join(run.texts)
        num_chars = rest[0].text_offset - self._num_taken_chars
        self._num_taken_chars += len(text[:num_chars])
        run.texts, run.tokens = [text[num_chars:]], rest
        return TextDelta(choice_index, [text[:num_chars]], tokens)


def _joins(last: Event | None, event: Event) -> bool:
    match last, event:
        case (ReasoningDelta(), ReasoningDelta()):
            return True
        case ToolArgumentsDelta(), ToolArgumentsDelta():
            return last.index == event.index
    return False
