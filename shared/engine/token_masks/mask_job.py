"""Computes the mask after the next tokens of one sequence, on a worker thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.engine.token_masks.grammar_position import GrammarPosition
from shared.engine.token_masks.mask_threads import SLOW_MASK_S
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
        """Computes a mask after the output's next `token_ids`. `refusal` is the error if the
        grammar does not allow one of them. The job computes nothing if it is not wanted by then.
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
        # two plain locks cost a fifth of an event: one job is made for each token
        self._has_ended = threading.Lock()  # taken by the first end
        self._running = threading.Lock()  # free once it is done
        self._running.acquire()
        self.is_done = False

    def wait(self, timeout_s: float) -> NDArray[np.int32] | None:
        """Waits as `TokenMask.wait` does. Also returns None after a failure."""
        if not self.is_done:
            if timeout_s <= 0 or not self._running.acquire(timeout=timeout_s):
                return None
            self._running.release()
        return self._words

    def run(self) -> None:
        if not self._is_wanted():
            self.end(error=GrammarFailed("the choice has ended"))
            return
        began_s = time.thread_time()
        try:
            words = self._advance()
        except GrammarTooComplex as error:  # includes rejected grammars
            self.end(error=GrammarFailed(error.message))
        except HearthError as error:
            self.end(error=error)
        except BaseException as error:  # native code panics with one; the thread continues
            self.end(error=GrammarFailed(f"the grammar failed: {error!r}"))
        else:
            self.is_slow = time.thread_time() - began_s > SLOW_MASK_S
            self.end(words)

    def _advance(self) -> bytes | None:
        """Returns the next words, as of `GrammarPosition.fill`."""
        num_allowed = self._position.advance(self._token_ids)
        if num_allowed < len(self._token_ids):
            token_id = self._token_ids[num_allowed]
            raise self._refusal(f"the grammar does not allow token {token_id} in the output")
        return self._position.fill()

    def time_out(self) -> None:
        self.end(error=GrammarFailed("the grammar takes too long for one token"))

    def end(self, words: bytes | None = None, error: HearthError | None = None) -> None:
        """Ends the job with the `words` of the mask; None: all tokens are allowed. The first end
        counts: a job that has timed out may still return.
        """
        if not self._has_ended.acquire(blocking=False):
            return
        self.error = error
        if error is None:
            self._words = (
                np.full(self._num_words, -1, np.int32)
                if words is None
                else np.frombuffer(words, np.int32)
            )
        self.is_done = True
        self._running.release()
        self.on_done()
