"""Receives the states of linked sites, and hands them to a HealthMonitor as heartbeats. Asks a site
for its models if they are new. The round trips to the sites are measured all the time.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.background import Background, is_logged
from shared.clock import Clock
from shared.errors import HearthError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import ReadSiteModels, SiteModels, SiteState
from shared.sites.site_states import SiteWorkers, StateBudget
from shared.subjects import STATES_OF_SITES, read_site_models, site_in
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

READ_TIMEOUT_S = 0.5  # and the round trip; the next state asks again


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
        self._asked: set[str] = set()  # gateways that have not replied yet
        self._on_state = on_state
        self._background = Background()

    async def start(self) -> None:
        await self._bus.subscribe(STATES_OF_SITES, SiteState, self._take)

    async def stop(self) -> None:
        await self._background.stop()

    def _take(self, state: SiteState) -> None:
        now, site = self._clock.now(), site_in(state.gateway_id) or ""
        budget = self._budgets.setdefault(site, StateBudget(now))
        if not budget.takes(state, now):
            if budget.num_refused == 1:
                log.warning("site_sends_too_many_states", site=site)
            return
        self._on_state(state)
        if self._workers.knows_models(state):
            self._observe(state)
        elif state.gateway_id not in self._asked:
            self._asked.add(state.gateway_id)
            self._background.start_item(self._read_models(state), is_logged)

    def _observe(self, state: SiteState) -> None:
        round_trips, now = self._health_monitor.requests.round_trips, self._clock.now()
        for heartbeat in self._workers.heartbeats(state):
            self._health_monitor.observe(heartbeat)
            round_trips.use(heartbeat.process_id, now)

    async def _read_models(self, state: SiteState) -> None:
        gateway_id = state.gateway_id
        try:
            models = await self._health_monitor.requests.request(
                *(gateway_id, read_site_models(gateway_id), ReadSiteModels(), SiteModels),
                base_s=READ_TIMEOUT_S,
            )
        except HearthError as error:
            log.debug("site_models_not_read", gateway=gateway_id, reason=error.code)
            return
        finally:
            self._asked.discard(gateway_id)
        self._workers.learn(models)
        if self._workers.knows_models(state):
            self._observe(state)
