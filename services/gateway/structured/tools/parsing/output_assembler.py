"""Converts the tokens of one choice to content, reasoning and calls: detokenizer, parser, stop
strings. Stop strings and logprobs are of content only.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.output.events import Event, ReasoningDelta, TextDelta
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.text.decoding.detokenizer import Detokenizer
from services.gateway.text.scored_tokens import HeldTokens
from services.gateway.text.stop_strings import StopAutomaton, StopStrings
from shared.messages import TokenLogprobs


class OutputAssembler:
    """`num_tokens`: all, up to the end of a stop string. `shows_reasoning`: false drops it; it is
    counted all the same.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: ResponseParser,
        markers: MarkerTokens,
        stop: StopAutomaton,
        choice_index: int,
        *,
        min_tokens: int,
        shows_reasoning: bool = True,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._detokenizer = detokenizer
        self._parser = parser
        self._markers = markers.by_token
        self._stop_strings = StopStrings(stop)
        self._choice = choice_index
        self._min_tokens = min_tokens
        self._shows_reasoning = shows_reasoning
        self._held = HeldTokens()
        self._unplaced: list[tuple[int, TokenLogprobs]] = []  # of text that the parser holds back

    @property
    def is_stopped(self) -> bool:
        return self._stop_strings.matched is not None

    @property
    def stop_sequence(self) -> str | None:
        return self._stop_strings.matched

    @property
    def num_calls(self) -> int:
        """Complete calls."""
        return self._parser.num_calls

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[Event]:
        """`logprobs`: of all tokens, or empty. Tokens after a stop string are not counted."""
        events: list[Event] = []
        for index, token_id in enumerate(token_ids):
            if self.is_stopped:
                break
            self.num_tokens += 1
            was_reasoning = self._parser.is_reasoning
            text = self._text_of(token_id)
            parsed = self._parser.feed(text)
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            if logprobs:
                self._unplaced.append((token_id, logprobs[index]))
                self._place(parsed, is_partial=not text)
            events += self._shown(parsed)
        if self.is_stopped:
            self._held.show_all()
        return events + self._scored() if logprobs else events

    def flush(self) -> list[Event]:
        """Returns what was held back, after the last token."""
        if self.is_stopped:
            return []
        parsed = self._parser.feed(self._detokenizer.flush()) + self._parser.finish()
        events = self._shown(parsed)
        rest = self._stop_strings.flush()
        if self._parser.is_in_content:
            for token_id, logprobs in self._unplaced:
                self._held.add(token_id, logprobs, "")
        self._held.show_all()
        if rest:
            events.append(TextDelta(self._choice, (rest,)))
        return events + self._scored()

    def _text_of(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        if marker is not None:
            return self._detokenizer.flush() + marker
        return "".join(self._detokenizer.feed((token_id,)))

    def _shown(self, parsed: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in parsed:
            if self.is_stopped:
                break
            if isinstance(event, TextDelta):
                self._show(event.text, events)
                continue
            held = self._stop_strings.flush()  # a stop string is not around a call
            if held:
                self._held.show(len(held))
                events.append(TextDelta(self._choice, (held,)))
            if self._shows_reasoning or not isinstance(event, ReasoningDelta):
                events.append(event)
        return events

    def _show(self, text: str, events: list[Event]) -> None:
        if self.num_tokens >= self._min_tokens:
            text = self._stop_strings.feed(text)
        if text:
            self._held.show(len(text))
            events.append(TextDelta(self._choice, (text,)))

    def _place(self, parsed: Sequence[Event], *, is_partial: bool) -> None:
        """Tokens are of content if the text that the parser releases with the last one is.
        `is_partial`: the last token only begins a character.
        """
        text = "".join(each.text for each in parsed if isinstance(each, TextDelta))
        if text:
            last = len(self._unplaced) - 1
            for index, (token_id, logprobs) in enumerate(self._unplaced):
                self._held.add(token_id, logprobs, text if index == last else "")
        may_show = self._parser.is_in_content and (is_partial or self._parser.holds_text)
        if text or not may_show:
            self._unplaced = []

    def _scored(self) -> list[Event]:
        """The tokens whose text is shown, in a delta without text."""
        tokens = self._held.take()
        return [TextDelta(self._choice, (), tokens)] if tokens else []
