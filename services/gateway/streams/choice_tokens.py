"""Orders the tokens of one choice.

`first_position` is an entry's position. Known tokens are dropped and overlaps cut. Entries after a
gap wait in a bounded buffer; an entry that does not fit is dropped and recovered by a resend.
Logprobs stay with their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import HearthError
from shared.messages import Finish, Served, TokenEntry, TokenLogprobs

MAX_AHEAD_ENTRIES = 256

Fresh = tuple[Sequence[int], Sequence[TokenLogprobs]]
_NOTHING: Fresh = ((), ())


class ChoiceTokens:
    def __init__(self, choice_index: int, token_ids: Sequence[int] = ()) -> None:
        """`token_ids` are those that another site's gateway has already received."""
        self.choice_index = choice_index
        self.last_token_at = 0.0  # time; the current placement only
        self.served: Served | None = None
        self.token_ids = list(token_ids)
        self.finish: Finish | None = None
        self.is_stopped = False  # the receiver found a stop string
        self.error: HearthError | None = None  # set if no worker can continue the choice
        self._ahead: dict[int, TokenEntry] = {}

    @property
    def is_finished(self) -> bool:
        """Whether the choice has ended. False after a failed attempt: the choice is resubmitted, or
        the request fails.
        """
        has_finish = self.finish is not None and self.finish.reason != "failed"
        return self.is_stopped or has_finish or self.error is not None

    @property
    def has_gap(self) -> bool:
        return bool(self._ahead)

    def accept(self, entry: TokenEntry) -> Fresh:
        """Returns the new tokens and logprobs, in order; sets `finish` at the end of the choice.

        Must not be called for a finished choice.
        """
        if entry.first_position > len(self.token_ids):
            if len(self._ahead) < MAX_AHEAD_ENTRIES:
                self._ahead[entry.first_position] = entry
            return _NOTHING
        fresh = self._append(entry)
        if not self._ahead:
            return fresh
        return self._with_ahead(fresh)

    def restart(self) -> None:
        """Prepares for a new placement, which continues after the last token in order."""
        self._ahead.clear()
        self.finish = None

    def _append(self, entry: TokenEntry) -> Fresh:
        num_known = len(self.token_ids) - entry.first_position
        token_ids, logprobs = entry.token_ids, entry.logprobs
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        self.token_ids.extend(token_ids)
        if entry.finish is not None:
            self.finish = entry.finish
        return token_ids, logprobs

    def _with_ahead(self, fresh: Fresh) -> Fresh:
        token_ids, logprobs = list(fresh[0]), list(fresh[1])
        for first_position in sorted(self._ahead):
            if first_position > len(self.token_ids):
                break
            more_ids, more_logprobs = self._append(self._ahead.pop(first_position))
            token_ids += more_ids
            logprobs += more_logprobs
        return token_ids, logprobs
