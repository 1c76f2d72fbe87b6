"""The masks of one choice whose reasoning has a budget, over those of its grammar if it has one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.engine.batching.sequence import SequenceGrammar
from shared.engine.step import TokenMask
from shared.engine.token_masks.thinking_position import ThinkingPosition
from shared.errors import HearthError
from shared.grammar.thinking import ThinkingBudget


class BudgetedOutput:
    """A `SequenceGrammar`. Without a grammar its masks are ready at once and never late."""

    def __init__(
        self,
        budget: ThinkingBudget,
        vocab_size: int,
        grammar: SequenceGrammar | None = None,
        output_ids: Iterable[int] = (),
    ) -> None:
        """Limits the thinking of an output. `output_ids` is the output so far, of another worker,
        which `grammar` has too.
        """
        self._position = ThinkingPosition(budget, output_ids)
        self._num_words = -(-vocab_size // 32)
        self._grammar = grammar

    @property
    def num_late_masks(self) -> int:
        return 0 if self._grammar is None else self._grammar.num_late_masks

    @property
    def is_stalled(self) -> bool:
        return self._grammar is not None and self._grammar.is_stalled

    @property
    def error(self) -> HearthError | None:
        return None if self._grammar is None else self._grammar.error

    @property
    def bans_stop(self) -> bool:
        return self._grammar is not None and self._grammar.bans_stop

    @property
    def num_free_tokens(self) -> int:
        of_grammar = None if self._grammar is None else self._grammar.num_free_tokens
        of_budget = self._position.num_free_tokens
        return of_budget if of_grammar is None else min(of_budget, of_grammar)

    def mask(self) -> TokenMask | None:
        of_grammar = None if self._grammar is None else self._grammar.mask()
        token_id = self._position.forced_token
        return (
            of_grammar if token_id is None else ForcedToken(token_id, self._num_words, of_grammar)
        )

    def accept(self, token_id: int) -> None:
        self._position.advance(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)

    def sit_out(self) -> None:
        if self._grammar is not None:
            self._grammar.sit_out()


class ForcedToken:
    """A `TokenMask` of one token; where the grammar does not allow it yet, as in the middle of a
    character, the grammar's.
    """

    def __init__(self, token_id: int, num_words: int, of_grammar: TokenMask | None) -> None:
        self._word, bit = divmod(token_id, 32)
        self._bit = np.uint32(1 << bit)
        self._num_words = num_words
        self._of_grammar = of_grammar

    def wait(self, timeout_s: float) -> NDArray[np.int32] | None:
        if self._of_grammar is not None:
            allowed = self._of_grammar.wait(timeout_s)
            if allowed is None or not allowed.view(np.uint32)[self._word] & self._bit:
                return allowed
        words = np.zeros(self._num_words, np.uint32)
        words[self._word] = self._bit
        return words.view(np.int32)
