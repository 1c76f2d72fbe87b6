"""Holds tokens with their logprobs, packed, and releases them no sooner than their text."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import overload

from shared.messages import TokenLogprobs
from shared.output.packed_logprobs import PackedLogprobs

_TOKEN_BYTES = 8  # id and offset


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`text_offset`: the number of output characters before this token."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


class ScoredTokens(Sequence[ScoredToken]):
    """A growing sequence in packed arrays; reading a token makes a new object."""

    __slots__ = ("_logprobs", "_text_offsets", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._text_offsets = array("I")
        self._logprobs = PackedLogprobs()

    @property
    def num_bytes(self) -> int:
        return _TOKEN_BYTES * len(self) + self._logprobs.num_bytes

    def append(self, token_id: int, logprobs: TokenLogprobs, text_offset: int) -> None:
        self._token_ids.append(token_id)
        self._text_offsets.append(text_offset)
        self._logprobs.append(logprobs)

    def extend(self, others: Sequence[ScoredToken]) -> None:
        if isinstance(others, ScoredTokens):
            self._token_ids.extend(others._token_ids)
            self._text_offsets.extend(others._text_offsets)
            self._logprobs.extend(others._logprobs)
            return
        for each in others:
            self.append(each.token_id, each.logprobs, each.text_offset)

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> ScoredToken: ...

    @overload
    def __getitem__(self, index: slice) -> ScoredTokens: ...

    def __getitem__(self, index: int | slice) -> ScoredToken | ScoredTokens:
        """Takes an index, or a slice of step 1."""
        if isinstance(index, slice):
            part = ScoredTokens()
            part._token_ids = self._token_ids[index]
            part._text_offsets = self._text_offsets[index]
            part._logprobs = self._logprobs[index]
            return part
        return ScoredToken(self._token_ids[index], self._logprobs[index], self._text_offsets[index])


class HeldTokens:
    """Holds a token until all text decoded up to it is shown.

    A token that ends within a character waits for the token that completes the character.
    """

    def __init__(self) -> None:
        self._tokens = ScoredTokens()  # not taken: first the released ones, then the waiting ones
        self._num_released = 0
        self._text_ends: deque[int] = deque()  # those of waiting tokens, to the last character
        self._num_decoded = 0
        self._num_shown = 0

    def add(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """Adds a token. `text`: the detokenizer's output for it; empty within a character."""
        self._tokens.append(token_id, logprobs, self._num_decoded)
        self._num_decoded += len(text)
        if text:
            num_ending = len(self._tokens) - self._num_released - len(self._text_ends)
            self._text_ends.extend(repeat(self._num_decoded, num_ending))

    def show(self, num_chars: int) -> None:
        self._num_shown += num_chars
        while self._text_ends and self._text_ends[0] <= self._num_shown:
            self._text_ends.popleft()
            self._num_released += 1

    def show_all(self) -> None:
        """Releases all tokens, at a match or at the end: no more text follows."""
        self._num_released = len(self._tokens)
        self._text_ends.clear()

    def take(self) -> Sequence[ScoredToken]:
        num_released, self._num_released = self._num_released, 0
        if not num_released:
            return ()
        held = self._tokens
        if num_released == len(held):
            self._tokens = ScoredTokens()
            return held
        self._tokens = held[num_released:]
        return held[:num_released]
