"""Tokens with their logprobs, told no sooner than the text that they belong to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`text_offset` counts characters of the output before this token."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


class HeldTokens:
    """A token waits until all text decoded up to it is shown.

    One that ends amid a character waits for the token that completes it.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # with the end of its text
        self._amid_character: list[ScoredToken] = []
        self._num_decoded = 0
        self._num_shown = 0
        self._released: list[ScoredToken] = []

    def add(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """`text` is what the detokenizer gave out for this token: none amid a character."""
        self._amid_character.append(ScoredToken(token_id, logprobs, self._num_decoded))
        self._num_decoded += len(text)
        if text:
            self._waiting.extend((each, self._num_decoded) for each in self._amid_character)
            self._amid_character.clear()

    def show(self, num_chars: int) -> None:
        self._num_shown += num_chars
        while self._waiting and self._waiting[0][1] <= self._num_shown:
            self._released.append(self._waiting.popleft()[0])

    def show_all(self) -> None:
        """At a match or at the end: no text follows that a token could wait for."""
        self._released += [token for token, _ in self._waiting]
        self._released += self._amid_character
        self._waiting.clear()
        self._amid_character.clear()

    def take(self) -> list[ScoredToken]:
        released, self._released = self._released, []
        return released
