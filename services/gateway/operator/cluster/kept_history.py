"""Keeps a cluster's events, samples and rejections in Redis, for the next start of a gateway.

    hearth:cluster:history    JSON: those of the gateway that wrote last

All gateways observe the same cluster, so any one's history serves the next. What happens while no
gateway runs is not recorded.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
import structlog

from services.gateway.operator.cluster.events import ClusterEvent
from services.gateway.operator.cluster.history import SAMPLE_S, FleetFigures
from services.gateway.operator.cluster.rejected_day import RejectedHour
from services.gateway.operator.cluster.state import ClusterView
from shared.background import failing_alone
from shared.clock import Clock
from shared.store import Store, StoreUnavailable
from shared.transport.wire_errors import UNREADABLE, one_line

log = structlog.get_logger(__name__)

KEY = "hearth:cluster:history"
KEPT_S = 7 * 86_400
EVENTS_S = 5.0  # the most that a killed gateway loses of its events
SAMPLES_S = 60.0  # and of its samples and rejections


class KeptHistory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    events: tuple[ClusterEvent, ...] = ()
    samples: tuple[FleetFigures, ...] = ()
    rejected: tuple[RejectedHour, ...] = ()


class HistoryKeeper:
    """Without an operator token nobody could read the history, and none is kept."""

    def __init__(self, store: Store, view: ClusterView, clock: Clock, *, is_on: bool) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self.is_on = is_on
        self._saved_event = 0
        self._saved_sample = 0
        self._failure = ""  # the failure that was logged last

    async def restore(self) -> None:
        """Reads the last history once. Without Redis, or with an unreadable record, there is
        none.
        """
        if not self.is_on:
            return
        try:
            data = await self._store.get(KEY)
            kept = KeptHistory() if data is None else msgspec.json.decode(data, type=KeptHistory)
        except StoreUnavailable as error:
            self._log_failure(error.message)
        except UNREADABLE as error:
            self._log_failure(one_line(error))
        else:
            self._view.restore(kept.events, kept.samples, kept.rejected)
            self._saved_event = self._view.events.last_number

    async def run(self) -> NoReturn:
        """Saves new events soon, and new samples from time to time."""
        while True:
            await self._clock.sleep(EVENTS_S)
            with failing_alone("cluster_history_not_saved"):
                if self._has_news():
                    await self.save()

    def _has_news(self) -> bool:
        history, events = self._view.history, self._view.events
        num_new_samples = history.num_samples - self._saved_sample
        return events.last_number > self._saved_event or num_new_samples * SAMPLE_S >= SAMPLES_S

    async def save(self) -> None:
        if not self.is_on:
            return
        events, history = self._view.events, self._view.history
        last_event, num_samples = events.last_number, history.num_samples
        rejected = self._view.rejected_day.hours
        kept = msgspec.json.encode(
            KeptHistory(events=events.all, samples=history.samples, rejected=rejected)
        )
        try:
            await self._store.write([("SET", KEY, kept, "EX", KEPT_S)])
        except StoreUnavailable as error:
            self._log_failure(error.message)
        else:
            self._saved_event, self._saved_sample, self._failure = last_event, num_samples, ""

    def _log_failure(self, failure: str) -> None:
        if failure != self._failure:
            log.warning("cluster_history_not_kept", error=failure)
        self._failure = failure
