"""Tracks a choice's reasoning, and the tokens that its budget forces. Pure.

ANSWER ──a mark that opens──▶ THINKING ──`max_tokens` tokens──▶ FORCED, token by token
   ▲                             │                                 │
   └──────a mark that closes─────┴─────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.grammar.thinking import ThinkingBudget

UNLIMITED = 2**31


class ThinkingPosition:
    """A function of the budget and the output's tokens alone, so that a resumed output goes on as
    if it had never stopped. The tokens of a mark that closes count until the mark is complete.
    """

    def __init__(self, budget: ThinkingBudget, output_ids: Iterable[int] = ()) -> None:
        self._budget = budget
        self._is_thinking = budget.is_open
        self._num_left = budget.max_tokens
        self._longest = max(map(len, (*budget.opens, *budget.closes)))
        self._recent: list[int] = []  # tokens since the last mark: as many as the longest mark has
        for token_id in output_ids:
            self.advance(token_id)

    @property
    def num_free_tokens(self) -> int:
        """The number of next tokens that are not forced, whatever they are."""
        if self._is_thinking:
            return self._num_left
        return 1 + self._num_left if self._budget.opens else UNLIMITED

    @property
    def forced_token(self) -> int | None:
        """The only token that may come next; None: the budget allows all."""
        if not self._is_thinking or self._num_left:
            return None
        begun = [(_num_begun(self._recent, mark), mark) for mark in self._budget.closes]
        num_tokens, mark = max(begun, key=lambda each: each[0])
        return mark[num_tokens]

    def advance(self, token_id: int) -> None:
        self._recent.append(token_id)
        marks = self._budget.closes if self._is_thinking else self._budget.opens
        if any(_ends_with(self._recent, mark) for mark in marks):
            self._is_thinking = not self._is_thinking
            self._recent.clear()
            return
        if self._is_thinking and self._num_left:
            self._num_left -= 1
        del self._recent[: -self._longest]


def _num_begun(recent: Sequence[int], mark: tuple[int, ...]) -> int:
    """Returns how many of the mark's first tokens are the last ones of `recent`."""
    longest = min(len(mark) - 1, len(recent))
    return next((n for n in range(longest, 0, -1) if tuple(recent[-n:]) == mark[:n]), 0)


def _ends_with(recent: Sequence[int], mark: tuple[int, ...]) -> bool:
    return recent[-1] == mark[-1] and tuple(recent[-len(mark) :]) == mark
