"""Tokens with their logprobs, released no sooner than their text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`text_offset`: number of output characters before this token."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


class HeldTokens:
    """Holds a token until all text decoded up to it is shown.

    A token that ends within a character waits for the token that completes the character.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # with the end of its text
        self._amid_character: list[ScoredToken] = []
        self._num_decoded = 0
        self._num_shown = 0
        self._released: list[ScoredToken] = []

    def add(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """`text`: the detokenizer's output for this token; empty within a character."""
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
        """Releases all tokens, at a match or at the end: no more text follows."""
        self._released += [token for token, _ in self._waiting]
        self._released += self._amid_character
        self._waiting.clear()
        self._amid_character.clear()

    def take(self) -> list[ScoredToken]:
        released, self._released = self._released, []
        return released
