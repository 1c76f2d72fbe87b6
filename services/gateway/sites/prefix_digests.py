"""Reports to each linked site which prefixes of its own requests this site still holds.

A scheduler there places further requests by it (`services/scheduler/sites/`). What is held comes
from the index of this site, asked in turn; a site without an index reports nothing.
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
from shared.subjects import MATCH, SITE_SEPARATOR, prefix_digest
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
MATCH_TIMEOUT_S = 0.1  # plus the round trip


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

    def computed(self, asked: Request, here: Request) -> None:
        """Takes in that a worker has computed the prompt of a request, which is `here` at this
        site.
        """
        self._held.computed(asked, here)

    def on_state(self, state: SiteState) -> None:
        digest = self._held.digest_of(state.gateway_id.partition(SITE_SEPARATOR)[0])
        if digest is not None:
            digest.heard(self._clock.now())

    async def run(self) -> None:
        while True:
            await self._clock.sleep(INTERVAL_S)
            with failing_alone("prefixes_not_checked"):
                await self._check()
            with failing_alone("digests_not_sent"):
                await self._send()

    async def _check(self) -> None:
        is_answered = True
        for prefix in self._held.due():
            num_blocks = await self._num_blocks(prefix) if is_answered else None
            is_answered = num_blocks is not None
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
        )
        try:
            reply = await self._health_monitor.requests.request(
                *(MATCH, MATCH, question, PrefixMatches), base_s=MATCH_TIMEOUT_S, unknown_s=0.0
            )
        except HearthError as error:
            log.debug("prefix_index_unavailable", reason=error.code)
            return None
        found = max((each.num_blocks for each in reply.matches), default=0)
        is_less = found // prefix.blocks_each < prefix.num_held
        return None if is_less and reply.state != "exact" else found

    async def _send(self) -> None:
        gateways, now = num_gateways(self._health_monitor.fleet), self._clock.now()
        for site, digest in self._held.digests():
            part = digest.take(now, num_gateways=gateways)
            if part is None:
                continue
            try:
                await self._bus.publish(prefix_digest(site), self._message(part))
            except HearthError as error:
                digest.begin_snapshot(now)
                log.warning("digest_not_sent", site=site, error=error.message)

    def _message(self, part: DigestPart) -> PrefixDigest:
        return PrefixDigest(
            gateway_id=self._gateway_id,
            epoch=self._health_monitor.epoch,
            sequence_number=part.sequence_number,
            is_first=part.is_first,
            added=pack_fingerprints(part.added),
            removed=pack_fingerprints(part.removed),
        )
