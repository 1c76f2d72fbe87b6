"""Receives the states of linked sites, and hands them to a HealthMonitor as heartbeats. The round
trips to their gateways are measured all the time.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.clock import Clock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import SiteState
from shared.sites.site_states import SiteWorkers, StateBudget
from shared.subjects import SITE_SEPARATOR, STATES_OF_SITES
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)


class LinkedSites:
    """`on_state` is called with every state."""

    def __init__(
        self,
        bus: Bus,
        health_monitor: HealthMonitor,
        clock: Clock,
        *,
        on_state: Callable[[SiteState], None] = lambda state: None,
    ) -> None:
        self._bus = bus
        self._health_monitor = health_monitor
        self._clock = clock
        self._workers = SiteWorkers()
        self._budgets: dict[str, StateBudget] = {}  # by site: those of the servers' configuration
        self._on_state = on_state

    async def start(self) -> None:
        await self._bus.subscribe(STATES_OF_SITES, SiteState, self._take)

    def _take(self, state: SiteState) -> None:
        round_trips, now = self._health_monitor.requests.round_trips, self._clock.now()
        site = state.gateway_id.partition(SITE_SEPARATOR)[0]
        budget = self._budgets.setdefault(site, StateBudget(now))
        if not budget.takes(state, now):
            if budget.num_refused == 1:
                log.warning("site_sends_too_many_states", site=site)
            return
        self._on_state(state)
        for heartbeat in self._workers.heartbeats(state):
            self._health_monitor.observe(heartbeat)
            round_trips.use(heartbeat.process_id, now)
