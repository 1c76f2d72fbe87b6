"""The distinct tokens of a growing sequence, and their counts in its output.

Penalties need them at every step; counting from scratch would take time proportional to the
context.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Belongs to one sequence. Tokens are in the order of their first appearance."""

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        self._token_ids = array("q")
        self._in_output = array("q")
        self._num_counted = 0

    def advance(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Counts new tokens. `token_ids` are those of the last call, and what has been appended
        since.
        """
        for token_id in token_ids[self._num_counted : num_prompt_tokens]:
            self._index(token_id)
        for token_id in token_ids[max(self._num_counted, num_prompt_tokens) :]:
            self._in_output[self._index(token_id)] += 1
        self._num_counted = len(token_ids)

    def token_ids(self) -> NDArray[np.int64]:
        """[n] distinct ones, a copy."""
        return np.array(self._token_ids)

    def in_output(self) -> NDArray[np.int64]:
        """[n] how often the output holds each, a copy; 0: only the prompt does."""
        return np.array(self._in_output)

    def _index(self, token_id: int) -> int:
        index = self._indices.setdefault(token_id, len(self._indices))
        if index == len(self._token_ids):
            self._token_ids.append(token_id)
            self._in_output.append(0)
        return index
