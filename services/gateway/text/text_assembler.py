"""Converts the tokens of one choice to the text that the client may see."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.text.decoding.detokenizer import Detokenizer
from services.gateway.text.scored_tokens import HeldTokens, ScoredToken
from services.gateway.text.stop_strings import StopAutomaton, StopStrings
from shared.messages import TokenLogprobs


class TextAssembler:
    """Detokenizer followed by stop strings; counts the tokens up to the end of a match.

    Stop strings are matched only from `min_tokens` tokens on. `take_scored` returns the tokens
    that have logprobs, as many as are counted.
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopAutomaton, *, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop)
        self._has_stop = bool(stop.strings)
        self._min_tokens = min_tokens
        self._held: HeldTokens | None = None  # of a choice with logprobs
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self._stop_strings.matched is not None

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that matched."""
        return self._stop_strings.matched

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[str]:
        """Returns a delta for each token with text to show. Tokens after a match are neither shown
        nor counted. `logprobs`: of all tokens, or empty.
        """
        if not self._has_stop and not logprobs:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)
        deltas = []
        for index, token_id in enumerate(token_ids):
            if self.is_stopped:
                break
            self.num_tokens += 1
            text = "".join(self._detokenizer.feed((token_id,)))
            shown = self._show(text)
            if shown:
                deltas.append(shown)
            if logprobs:
                self._held = self._held or HeldTokens()
                self._held.add(token_id, logprobs[index], text)
                self._held.show(len(shown))
        if self.is_stopped and self._held is not None:
            self._held.show_all()
        return deltas

    def flush(self) -> str:
        """Returns the buffered text after the last token; may still find a match in it."""
        text = self._show(self._detokenizer.flush())
        if self._held is not None:
            self._held.show_all()
        return text + self._stop_strings.flush()

    def take_scored(self) -> Sequence[ScoredToken]:
        """Returns the tokens whose text was released since the last call."""
        return () if self._held is None else self._held.take()

    def _show(self, text: str) -> str:
        return text if self.num_tokens < self._min_tokens else self._stop_strings.feed(text)
