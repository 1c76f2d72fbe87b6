"""Logs how many requests were rejected, by error code, from the counters alone: rejections cost
nothing here, and a flood of them is one line per code and interval.

Wrong keys and errors of the cluster are warnings. Invalid requests of clients are ordinary: each
tenant's are in samples of `request_ended`, at level info.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import structlog

from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import CLUSTER_CODES, AuthenticationFailed

log = structlog.get_logger(__name__)

INTERVAL_S = 10.0
WARNED_CODES = CLUSTER_CODES | {AuthenticationFailed.code}


class RejectionLog:
    """`counts` are the rejections since the start of this process, by error code."""

    def __init__(self, counts: Counter[str], clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._logged: Counter[str] = Counter()

    async def run(self) -> NoReturn:
        while True:
            await self._clock.sleep(INTERVAL_S)
            with failing_alone("rejections_not_logged"):
                self.log_new()

    def log_new(self) -> None:
        """Logs the number of rejections since the last call, a line per code."""
        found = self._counts - self._logged
        self._logged = self._counts.copy()
        for code in sorted(found.keys() & WARNED_CODES):
            log.warning("requests_rejected", code=code, num_requests=found[code])
