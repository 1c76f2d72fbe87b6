"""Computes the mask after the next tokens of one sequence, on a thread of a lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.engine.grammar.grammar_position import GrammarPosition
from shared.engine.grammar.mask_lanes import SLOW_MASK_S
from shared.errors import GrammarFailed, GrammarTooComplex, HearthError


class MaskJob:
    """A `TokenMask`. Until it is done, it alone uses `position`; if it fails, nothing does."""

    def __init__(
        self,
        tenant_id: str,
        position: GrammarPosition,
        token_ids: Sequence[int],
        *,
        vocab_size: int,
        is_wanted: Callable[[], bool] = lambda: True,
        refusal: type[HearthError] = GrammarFailed,
    ) -> None:
        """`token_ids`: the output's next ones; `refusal`: the error if the grammar does not allow
        one of them. The job computes nothing if it is not wanted by then.
        """
        self.tenant_id = tenant_id
        self.error: HearthError | None = None
        self.is_slow = False  # it took long, of CPU time
        self.on_done: Callable[[], None] = lambda: None  # called on the job's thread
        self._position = position
        self._token_ids = token_ids
        self._num_words = -(-vocab_size // 32)
        self._is_wanted = is_wanted
        self._refusal = refusal
        self._words: NDArray[np.int32] | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> NDArray[np.int32] | None:
        """As of `TokenMask`; also None after a failure."""
        if not self._done.is_set() and (timeout_s <= 0 or not self._done.wait(timeout_s)):
            return None
        return self._words

    def run(self) -> None:
        if not self._is_wanted():
            self.end(error=GrammarFailed("the choice has ended"))
            return
        began_s = time.thread_time()
        try:
            words = self._advance()
        except GrammarTooComplex as error:  # or a refusal
            self.end(error=GrammarFailed(error.message))
        except HearthError as error:
            self.end(error=error)
        except BaseException as error:  # native code panics with one; the lane continues
            self.end(error=GrammarFailed(f"the grammar failed: {error!r}"))
        else:
            self.is_slow = time.thread_time() - began_s > SLOW_MASK_S
            self.end(words)

    def _advance(self) -> bytes | None:
        """The next words, as of `GrammarPosition.fill`."""
        num_allowed = self._position.advance(self._token_ids)
        if num_allowed < len(self._token_ids):
            token_id = self._token_ids[num_allowed]
            raise self._refusal(f"the grammar does not allow token {token_id} in the output")
        return self._position.fill()

    def time_out(self) -> None:
        self.end(error=GrammarFailed("the grammar takes too long for one token"))

    def end(self, words: bytes | None = None, error: HearthError | None = None) -> None:
        """`words`: of the mask; None: all tokens are allowed. The first end counts: a job that has
        timed out may still return.
        """
        with self._lock:
            if self._done.is_set():
                return
            self.error = error
            if error is None:
                self._words = (
                    np.full(self._num_words, -1, np.int32)
                    if words is None
                    else np.frombuffer(words, np.int32)
                )
            self._done.set()
        self.on_done()
