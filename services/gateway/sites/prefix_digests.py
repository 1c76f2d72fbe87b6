"""Reports to each linked site which prefixes of its own requests this site still holds.

A scheduler there places further requests by it (`services/scheduler/sites/`). What is held comes
from the index of this site, asked in turn; a site without an index reports nothing. What was
computed for tenants of a region class is asked and reported in messages of this class, which the
bus brings to processes of its regions alone.
"""

from __future__ import annotations

import structlog

from services.gateway.sites.held_prefixes import HeldPrefix, HeldPrefixes
from services.gateway.sites.site_digest import DigestPart
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import MatchPrefix, PrefixDigest, PrefixMatches, Request, SiteState
from shared.sites.prefix_fingerprints import pack_fingerprints
from shared.sites.site_states import num_gateways
from shared.sites.tenant_names import names_of
from shared.subjects import MATCH, SITE_SEPARATOR, prefix_digest
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
MATCH_TIMEOUT_S = 0.1  # plus the round trip
WITHDRAWN_S = 900.0  # workers retain nothing of a withdrawn tenant for as long
MAX_WITHDRAWN = 10_000  # tenants


class PrefixDigests:
    def __init__(
        self,
        gateway_id: str,
        bus: Bus,
        clock: Clock,
        health_monitor: HealthMonitor,
    ) -> None:
        """`gateway_id` is this gateway's name at other sites."""
        self._gateway_id = gateway_id
        self._bus = bus
        self._clock = clock
        self._health_monitor = health_monitor
        self._held = HeldPrefixes()
        self._regions: dict[str, str] = {}  # by site: those of the configuration
        self._withdrawn: dict[str, float] = {}  # by name of a tenant, until when

    def computed(self, asked: Request, here: Request) -> None:
        """Takes in that a worker has computed the prompt of a request, which is `here` at this
        site.
        """
        if self._withdrawn.get(here.tenant_id, 0.0) <= self._clock.now():
            self._held.computed(asked, here)

    def withdraw(self, tenant_id: str, is_kept_here: bool) -> None:
        """Forgets what is held of a tenant `{site}/{tenant}`, and, unless `is_kept_here`, what its
        last requests compute.
        """
        for name in names_of(tenant_id):
            self._held.withdraw_tenant(name)
            if not is_kept_here:
                self._withdrawn.pop(name, None)
                self._withdrawn[name] = self._clock.now() + WITHDRAWN_S
        for name in list(self._withdrawn)[:-MAX_WITHDRAWN]:
            del self._withdrawn[name]

    def on_state(self, state: SiteState) -> None:
        """Takes in the state of another site. In another region it may not learn what it might."""
        site = state.gateway_id.partition(SITE_SEPARATOR)[0]
        if self._regions.setdefault(site, state.region) != state.region:
            self._regions[site] = state.region
            self._held.withdraw_classes(site)
        for digest in self._held.digests_of(site):
            digest.heard(self._clock.now())

    async def run(self) -> None:
        while True:
            await self._clock.sleep(INTERVAL_S)
            with failing_alone("prefixes_not_checked"):
                await self._check()
            with failing_alone("digests_not_sent"):
                await self._send()

    async def _check(self) -> None:
        unanswered = set[str]()  # region classes whose index does not reply
        for prefix in self._held.due():
            is_asked = prefix.region_class not in unanswered
            num_blocks = await self._num_blocks(prefix) if is_asked else None
            if num_blocks is None:
                unanswered.add(prefix.region_class)
            self._held.checked(prefix, num_blocks)

    async def _num_blocks(self, prefix: HeldPrefix) -> int | None:
        """Returns the leading blocks that a worker of this site holds. None without a reply, or if
        the index is not exact and knows of fewer than before.
        """
        question = MatchPrefix(
            tenant_id=prefix.tenant_id,
            model=prefix.model,
            revision=prefix.revision,
            block_hashes=prefix.block_hashes,
            is_counted=False,
            region_class=prefix.region_class,
        )
        try:
            reply = await self._health_monitor.requests.request(
                MATCH, MATCH, question, PrefixMatches, base_s=MATCH_TIMEOUT_S, unknown_s=0.0
            )
        except HearthError as error:
            log.debug("prefix_index_unavailable", reason=error.code)
            return None
        found = max((each.num_blocks for each in reply.matches), default=0)
        is_less = found // prefix.blocks_each < prefix.num_held
        return None if is_less and reply.state != "exact" else found

    async def _send(self) -> None:
        gateways, now = num_gateways(self._health_monitor.fleet), self._clock.now()
        for (site, region_class), digest in self._held.digests():
            num_shares = gateways * len(self._held.digests_of(site))
            if not self._may_learn(site, region_class):
                continue
            part = digest.take(now, num_shares=num_shares)
            if part is None:
                continue
            try:
                await self._bus.publish(prefix_digest(site), self._message(part, region_class))
            except HearthError as error:
                digest.begin_snapshot(now)
                log.warning("digest_not_sent", site=site, error=error.message)

    def _may_learn(self, site: str, region_class: str) -> bool:
        regions = self._health_monitor.refusals.classes.allowed(region_class, None)
        return regions is None or self._regions.get(site) in regions

    def _message(self, part: DigestPart, region_class: str) -> PrefixDigest:
        return PrefixDigest(
            gateway_id=self._gateway_id,
            epoch=self._health_monitor.epoch,
            sequence_number=part.sequence_number,
            is_first=part.is_first,
            added=pack_fingerprints(part.added),
            removed=pack_fingerprints(part.removed),
            region_class=region_class,
        )
