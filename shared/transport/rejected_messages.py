"""The log of messages that a process does not take."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import structlog

from shared.subjects import site_of
from shared.telemetry.log_limit import LogLimit

log = structlog.get_logger(__name__)

OUTSIDE_REGIONS = "outside_regions"
INVALID = "message_invalid"


class RejectedMessages:
    """Logs messages that are invalid or name a wrong sender. Invalid ones, those of another site,
    and those that may not be in this region have one line of each kind a minute: neither a link,
    nor a bug, nor heartbeats of a newer release must fill this site's disks.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._limit = LogLimit(now)

    def write(self, event: str, subject: str, error: str) -> None:
        site = site_of(subject)
        if site is None and event == OUTSIDE_REGIONS:
            self._limit.write(log.warning, event, error, subject=subject, error=error)
        elif site is None and event == INVALID:
            self._limit.write(log.warning, event, subject, subject=subject, error=error)
        elif site is None:
            log.warning(event, subject=subject, error=error)
        else:
            self._limit.write(log.warning, event, site, site=site, subject=subject, error=error)
