"""Receives the states of linked sites, and hands them to a HealthMonitor as heartbeats. Asks a site
for its models if they are new. The round trips to the sites are measured all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from shared.allowance import Allowance
from shared.background import Background, is_logged
from shared.clock import Clock
from shared.errors import HearthError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import LinkLoad, ReadSiteModels, SiteModels, SiteState
from shared.sites.gateway_epochs import GatewayEpochs, SiteInstances
from shared.sites.link_loads import LinkLoads
from shared.sites.site_workers import MAX_MODELS_PER_S, SiteWorkers
from shared.subjects import STATES_OF_SITES, read_site_models, site_in
from shared.telemetry.log_limit import LogLimit
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

DOUBLED = "its gateways have different secrets or NATS servers: two sites have its name and its key"
OWN_DOUBLED = "another site has the name of this one, and connects with its key"
GATEWAY_DOUBLED = "two of its gateways have one name: two sites have its name and its key"
OWN_NAME = (
    "it has the name of this site: HEARTH_SITE and --site of nats-config differ, here or there"
)
READ_TIMEOUT_S = 0.5  # and the round trip; the next state asks again
MAX_READS, READS_S = 64, 10.0  # of the models of one site


class LinkedSites:
    """`own` is the name of this site, and `expected` are those to which it has links. `loads` is
    for a HealthMonitor, which comes with `start`, and reports them in its heartbeats.
    """

    def __init__(self, bus: Bus, clock: Clock, own: str, expected: Iterable[str] = ()) -> None:
        self._bus, self._own = bus, own
        self._clock = clock
        self._workers = SiteWorkers()
        self._epochs, self._instances = GatewayEpochs(), SiteInstances()
        # by site: those of the servers' configuration
        self._states: dict[str, Allowance] = {}
        self._reads: dict[str, Allowance] = {}
        self._links = LinkLoads(expected, bus.site_bytes, clock.now())
        self._refused = bus.refused_sites
        self._lines = LogLimit(clock.now)
        self._health_monitor: HealthMonitor | None = None
        self._asked: set[str] = set()  # gateways that have not replied yet
        self._on_state: Callable[[SiteState], None] = lambda state: None
        self._background = Background()

    async def start(
        self,
        health_monitor: HealthMonitor,
        on_state: Callable[[SiteState], None] = lambda state: None,
    ) -> None:
        """`on_state` is called with every state."""
        self._health_monitor, self._on_state = health_monitor, on_state
        self._refused.on_state = self._state_refused
        await self._bus.subscribe(STATES_OF_SITES, SiteState, self._take)

    async def stop(self) -> None:
        await self._background.stop()

    def count(self, process_id: str | None, name: str) -> None:
        """Adds 1 to a count of LinkLoad, for a process of another site."""
        site = None if process_id is None else site_in(process_id)
        if site is not None:
            self._links.count(site, name)

    def region_of(self, site: str) -> str | None:
        """Returns the region that the site has stated, "" if it has none; None before its first
        state.
        """
        return self._links.region_of(site)

    def doubled(self) -> tuple[str, ...]:
        """Returns the linked sites of which there are two with one name."""
        return self._instances.doubled(self._clock.now())

    def loads(self) -> tuple[LinkLoad, ...]:
        monitor, now = self._health_monitor, self._clock.now()
        if monitor is None:
            return ()
        measured_s = monitor.requests.round_trips.measured_s
        return self._links.loads(now, measured_s, can_judge=monitor.fleet.can_judge(now))

    @property
    def _monitor(self) -> HealthMonitor:
        assert self._health_monitor is not None, "not started"
        return self._health_monitor

    def _state_refused(self, site: str, reason: str) -> None:
        """Takes in that a state has named another sender, or another region."""
        self._links.refused(site, reason, self._clock.now())

    def _take(self, state: SiteState) -> None:
        now, gateway_id = self._clock.now(), state.gateway_id
        site = site_in(gateway_id) or ""
        if site == self._own:
            self._refuse(site, "site_has_own_name", OWN_NAME, site=site)
            return
        if self._instances.is_doubled(site, state.instance, now):
            self._refuse(site, "site_doubled", DOUBLED, site=site)
            return
        if self._own in state.doubled:
            self._refuse(site, "own_site_doubled", OWN_DOUBLED, site=self._own, seen_by=site)
            return
        self._refused.reasons.pop(site, None)
        allowed = self._states.setdefault(site, Allowance(MAX_MODELS_PER_S, 1.0, now))
        if not allowed.takes(1 + len(state.loads), now):
            self._links.count(site, "num_refused_states")
            self._lines.write(log.warning, "site_sends_too_many_states", site, site=site)
            return
        self._links.heard(site, state.region, now)
        self._monitor.requests.round_trips.use(gateway_id, now)
        if self._epochs.is_doubled(gateway_id, state.epoch, now):
            self._lines.write(log.warning, "site_gateway_doubled", gateway_id, gateway=gateway_id)
            self._links.refused(site, GATEWAY_DOUBLED, now)
            return
        self._on_state(state)
        if self._workers.knows_models(state):
            self._observe(state)
        elif self._may_read(site, gateway_id, now):
            self._asked.add(gateway_id)
            self._background.start_item(self._read_models(state), is_logged)

    def _refuse(self, peer: str, event: str, reason: str, **fields: str) -> None:
        """Takes nothing from a site that cannot be told from another one, until it is alone."""
        self._refused.reasons[peer] = reason
        self._links.refused(peer, reason, self._clock.now())
        self._lines.write(log.warning, event, peer, **fields, reason=reason)

    def _may_read(self, site: str, gateway_id: str, now: float) -> bool:
        allowed = self._reads.setdefault(site, Allowance(MAX_READS, READS_S, now))
        return gateway_id not in self._asked and allowed.takes(1, now)

    def _observe(self, state: SiteState) -> None:
        for heartbeat in self._workers.heartbeats(state, self._clock.now()):
            self._monitor.observe(heartbeat)

    async def _read_models(self, state: SiteState) -> None:
        gateway_id = state.gateway_id
        try:
            models = await self._monitor.requests.request(
                gateway_id,
                read_site_models(gateway_id),
                ReadSiteModels(),
                SiteModels,
                base_s=READ_TIMEOUT_S,
            )
        except HearthError as error:
            log.debug("site_models_not_read", gateway=gateway_id, reason=error.code)
            return
        finally:
            self._asked.discard(gateway_id)
        if not self._workers.learn(models, self._clock.now()):
            site = site_in(gateway_id) or ""
            self._lines.write(log.warning, "site_has_too_many_models", site, site=site)
        elif self._workers.knows_models(state):
            self._observe(state)
