"""Converts the tokens of one choice to events: detokenizer, parser and stop strings.
Stop strings and logprobs apply to content only.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.output.choice_output import Part
from services.gateway.output.events import Event, ReasoningDelta, TextDelta
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.text.decoding.detokenizer import Detokenizer
from services.gateway.text.scored_tokens import HeldTokens, ScoredToken
from services.gateway.text.stop_strings import StopAutomaton, StopStrings
from shared.messages import TokenLogprobs

NO_MARKERS = MarkerTokens()


class OutputAssembler:
    """The assembler of one choice. Stop strings are matched from the token `min_tokens` on.
    `parser` separates calls and reasoning; if it is None, all text is content. If `shows_reasoning`
    is false, reasoning is dropped but counted. `num_tokens` counts all tokens up to the end of a
    stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopAutomaton,
        parser: ResponseParser | None = None,
        markers: MarkerTokens = NO_MARKERS,
        *,
        min_tokens: int = 0,
        shows_reasoning: bool = True,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._detokenizer = detokenizer
        self._parser = parser
        self._markers = markers.by_token
        self._stop_strings = StopStrings(stop)
        self._is_bare = parser is None and not stop.strings  # text needs no parsing
        self._min_tokens = min_tokens
        self._shows_reasoning = shows_reasoning
        self._held: HeldTokens | None = None  # tokens of a choice with logprobs
        self._unplaced: list[tuple[int, TokenLogprobs]] = []  # the parser holds back their text

    @property
    def is_stopped(self) -> bool:
        return self._stop_strings.matched is not None

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that matched, or None."""
        return self._stop_strings.matched

    @property
    def num_calls(self) -> int:
        """The number of complete calls."""
        return 0 if self._parser is None else self._parser.num_calls

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[Part]:
        """Returns a text for each token with content to show, and the events between them. Tokens
        after a stop string are neither shown nor counted. `logprobs` has one entry a token, or is
        empty.
        """
        if self._is_bare and not logprobs:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)  # type: ignore[return-value]  # unchanged
        if logprobs and self._held is None:
            self._held = HeldTokens()
        held, parser = self._held if logprobs else None, self._parser
        parts: list[Part] = []
        for index, token_id in enumerate(token_ids):
            if self._stop_strings.matched is not None:
                break
            self.num_tokens += 1
            if parser is not None:
                scored = None if held is None else logprobs[index]
                self._feed_parser(parser, token_id, scored, parts)
                continue
            text = "".join(self._detokenizer.feed((token_id,)))
            if held is not None:
                held.add(token_id, logprobs[index], text)
            self._show(text, parts)
        if self.is_stopped:
            self._show_all_tokens()
        return parts

    def flush(self) -> list[Part]:
        """Returns the parts that were held back, after the last token. They may still contain a
        stop string.
        """
        if self.is_stopped:
            return []
        text, parts = self._detokenizer.flush(), list[Part]()
        if self._parser is None:
            self._show(text, parts)
        else:
            self._add_parsed(self._parser.feed(text) + self._parser.finish(), parts)
            if self._held is not None and self._parser.is_in_content:
                for token_id, logprobs in self._unplaced:
                    self._held.add(token_id, logprobs, "")
        self._show_all_tokens()
        rest = self._stop_strings.flush()
        if rest:
            parts.append(rest)
        return parts

    def take_scored(self) -> Sequence[ScoredToken]:
        """Returns the tokens whose text has been released since the last call."""
        return () if self._held is None else self._held.take()

    def _show(self, text: str, parts: list[Part]) -> None:
        if self.num_tokens >= self._min_tokens:
            text = self._stop_strings.feed(text)
        if text:
            parts.append(text)
            if self._held is not None:
                self._held.show(len(text))

    def _show_all_tokens(self) -> None:
        if self._held is not None:
            self._held.show_all()

    # ── with a parser ────────────────────────────────────────────────────────────────────────────

    def _feed_parser(
        self,
        parser: ResponseParser,
        token_id: int,
        logprobs: TokenLogprobs | None,
        parts: list[Part],
    ) -> None:
        was_reasoning = parser.is_reasoning
        text = self._text_of(token_id)
        parsed = parser.feed(text)
        self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
        if logprobs is not None and self._held is not None:
            self._unplaced.append((token_id, logprobs))
            self._place(parser, self._held, parsed, is_partial=not text)
        self._add_parsed(parsed, parts)

    def _text_of(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        if marker is not None:
            return self._detokenizer.flush() + marker
        return "".join(self._detokenizer.feed((token_id,)))

    def _add_parsed(self, parsed: Sequence[Event], parts: list[Part]) -> None:
        for event in parsed:
            if self.is_stopped:
                break
            if isinstance(event, TextDelta):
                self._show(event.text, parts)
                continue
            held = self._stop_strings.flush()  # no stop string spans a call
            if held:
                parts.append(held)
                if self._held is not None:
                    self._held.show(len(held))
            if self._shows_reasoning or not isinstance(event, ReasoningDelta):
                parts.append(event)

    def _place(
        self,
        parser: ResponseParser,
        held: HeldTokens,
        parsed: Sequence[Event],
        *,
        is_partial: bool,
    ) -> None:
        """Assigns waiting tokens to content if the parser releases content with the last one.
        `is_partial` means that the last token only begins a character.
        """
        text = "".join(each.text for each in parsed if isinstance(each, TextDelta))
        if text:
            last = len(self._unplaced) - 1
            for index, (token_id, logprobs) in enumerate(self._unplaced):
                held.add(token_id, logprobs, text if index == last else "")
        may_show = parser.is_in_content and (is_partial or parser.holds_text)
        if text or not may_show:
            self._unplaced = []
