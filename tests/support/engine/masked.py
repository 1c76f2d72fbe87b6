"""A small grammar for sequences whose masks are late, or whose grammar is compiled late."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.errors import HearthError

MODULUS = 5
STALLED_POLLS = 3


def words_of(allowed: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Returns a mask that allows these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class ReadyMask:
    def __init__(self, allowed: Iterable[int], vocab_size: int) -> None:
        self.words = words_of(allowed, vocab_size)

    def wait(self, timeout_s: float) -> NDArray[np.int32]:
        return self.words


class LateMask:
    """Records how long it was waited for, in vain."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def wait(self, timeout_s: float) -> None:
        self.timeouts.append(timeout_s)


class SumGrammar:
    """Each token, by modulus, is the sum of those before plus 1. After `length` tokens, only `end`.

    `late_at` has the output positions at which the first mask is late. After it, and first for
    `compiled_after` polls, the sequence is stalled: each poll brings the mask nearer.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        late_at: Iterable[int] = (),
        compiled_after: int = 0,
        modulus: int = MODULUS,
        length: int | None = None,
        end: int = 0,
        output_ids: Iterable[int] = (),
    ) -> None:
        self.error: HearthError | None = None
        self.bans_stop = False
        self.accepted: list[int] = list(output_ids)
        self.num_late_masks = 0
        self._vocab_size = vocab_size
        self._late_at = set(late_at)
        self._num_polls = compiled_after
        self._modulus = modulus
        self._length = length
        self._end = end

    @property
    def is_stalled(self) -> bool:
        self._num_polls = max(0, self._num_polls - 1)
        return self._num_polls > 0

    def allowed(self) -> list[int]:
        if self._length is not None and len(self.accepted) >= self._length:
            return [self._end]
        first = (sum(self.accepted) + 1) % self._modulus
        return list(range(first, self._vocab_size, self._modulus))

    @property
    def num_free_tokens(self) -> int:
        return 0

    def mask(self) -> ReadyMask | LateMask:
        assert self._num_polls == 0, "a stalled sequence samples"
        if len(self.accepted) in self._late_at:
            return LateMask()
        return ReadyMask(self.allowed(), self._vocab_size)

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed()
        self.accepted.append(token_id)

    def sit_out(self) -> None:
        self._late_at.remove(len(self.accepted))
        self.num_late_masks += 1
        self._num_polls = STALLED_POLLS
