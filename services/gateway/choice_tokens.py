"""The tokens of one choice, put in order.

Entries are numbered by `first_position`. What is already known is dropped, what overlaps is cut,
what comes too early waits in a bounded buffer; what does not fit in there is lost here and comes
again by a resend.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import Finish, TokenEntry

MAX_AHEAD_ENTRIES = 256


class ChoiceTokens:
    def __init__(self, choice_index: int) -> None:
        self.choice_index = choice_index
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.is_stopped = False  # the receiver has all it wants
        self._ahead: dict[int, TokenEntry] = {}

    @property
    def is_finished(self) -> bool:
        """A failed try is no ending: the choice goes on elsewhere, or the request fails."""
        return self.is_stopped or (self.finish is not None and self.finish.reason != "failed")

    @property
    def has_gap(self) -> bool:
        return bool(self._ahead)

    def accept(self, entry: TokenEntry) -> Sequence[int]:
        """Returns the tokens that are new and in order; sets `finish` when the end is reached."""
        if self.is_finished:
            return ()
        if entry.first_position > len(self.token_ids):
            if len(self._ahead) < MAX_AHEAD_ENTRIES:
                self._ahead[entry.first_position] = entry
            return ()
        fresh = self._append(entry)
        if not self._ahead:
            return fresh
        return [*fresh, *self._take_ahead()]

    def restart(self) -> None:
        """A new placement goes on behind the last token in order."""
        self._ahead.clear()
        self.finish = None

    def _append(self, entry: TokenEntry) -> Sequence[int]:
        num_known = len(self.token_ids) - entry.first_position
        fresh = entry.token_ids[num_known:] if num_known else entry.token_ids
        self.token_ids.extend(fresh)
        if entry.finish is not None:
            self.finish = entry.finish
        return fresh

    def _take_ahead(self) -> list[int]:
        taken: list[int] = []
        for first_position in sorted(self._ahead):
            if first_position > len(self.token_ids):
                break
            taken += self._append(self._ahead.pop(first_position))
        return taken
