"""How often a request is resubmitted, and how long it waits for a worker. No I/O.

The loss of a worker may be the request's fault, so few of them end it. The loss of another site
mostly is a cut link, which may happen often and last long: with tokens from there it is free, and
the site is not excluded.
"""

from __future__ import annotations

from services.gateway.streams.actions import ResubmissionCause
from services.gateway.streams.try_record import TryRecord
from shared.subjects import is_at_site

RECOVERY_WINDOW_S = 10.0  # longer than that of a new request: the client may have a part
LINK_WINDOW_S = 60.0
MAX_RESUBMISSIONS = 5
MAX_LINK_LOSSES = 20  # in a row, without a token

_LINK_LOSSES: tuple[ResubmissionCause, ...] = ("worker_lost", "resends_failed", "placement_unknown")


class ResubmissionBudget:
    def __init__(self) -> None:
        self._num_charged = self._num_link_losses = 0

    def take(self, ended: TryRecord, cause: ResubmissionCause) -> bool:
        """Counts a resubmission after the try `ended`. Returns whether the budget allows it."""
        if cause == "regions_changed":
            return True
        if not was_at_site(ended) or cause not in _LINK_LOSSES:
            self._num_charged += 1
            return self._num_charged <= MAX_RESUBMISSIONS
        self._num_link_losses = 1 if ended.num_tokens else self._num_link_losses + 1
        return self._num_link_losses <= MAX_LINK_LOSSES


def was_at_site(ended: TryRecord) -> bool:
    """Whether another site served the try."""
    return ended.placed is not None and is_at_site(ended.placed.worker_id)


def excluded_after_silence(worker_id: str) -> str | None:
    """Returns the worker that a request avoids from now on. A site takes requests again once its
    link is back.
    """
    return None if is_at_site(worker_id) else worker_id


def recovery_window_s(last_worker_id: str | None) -> float:
    is_far = last_worker_id is not None and is_at_site(last_worker_id)
    return LINK_WINDOW_S if is_far else RECOVERY_WINDOW_S
