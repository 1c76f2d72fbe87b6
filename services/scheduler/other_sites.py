"""The linked sites as this scheduler sees them: which serve a request, and what they hold of it.

A request that finds no room here goes to the site with the least predicted time to first token: its
queue and its speed, as the site reports them, the round trip, as it is measured here, and the
prefix that it holds, by its digests. Those of a region class count for requests of the class, and
for sites that the class and the request's own regions admit.

A site that lies about its load gets at most the requests that have found no room at home. If it
does not take them, it is closed (`sites/unwilling_sites.py`); if it takes and spoils them, it costs
these requests what any worker costs that does. No report brings it nearer than its round trip.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.scheduler.backlog import QueuedRequest
from services.scheduler.candidates import size_of
from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import ModelWorkers, leaves_home, prompt_s
from services.scheduler.sites.site_prefixes import SitePrefixes
from services.scheduler.sites.unwilling_sites import UnwillingSites
from shared.background import Background, failing_alone
from shared.clock import Clock
from shared.lifecycle.health import Loss
from shared.messages import PrefixDigest, Request
from shared.subjects import ANY, from_sites, gateway_at_site, site_in
from shared.tenancy.refusals import Refusals
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

SWEEP_S = 10.0


class OtherSites:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        workers: WorkerFleet,
        refusals: Refusals,
        region_of: Callable[[str], str | None] = lambda site: None,
    ) -> None:
        """`region_of` a site is that of its link; None before its first state."""
        self._refusals, self._region_of = refusals, region_of
        self.prefixes = SitePrefixes()
        self._bus = bus
        self._clock = clock
        self._workers = workers
        self._unwilling = UnwillingSites()
        self._workers_of: dict[str, set[str]] = {}  # by site, those that are live
        self._background = Background()

    async def start(self) -> None:
        digests = from_sites("scheduler", ANY, "digest")
        await self._bus.subscribe(digests, PrefixDigest, self._take_digest)
        self._background.start_own(self._sweep())

    async def stop(self) -> None:
        await self._background.stop()

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def seen(self, worker_id: str) -> None:
        """Takes in that a worker has sent its load, and may have stopped with it."""
        site = site_in(worker_id)
        if site is not None and self._workers.knows(worker_id):
            self._workers_of.setdefault(site, set()).add(worker_id)

    def lost(self, process_id: str, loss: Loss) -> None:
        site = site_in(process_id)
        if site is None:
            return
        self._workers_of.get(site, set()).discard(process_id)
        if loss is not Loss.STOPPED:  # the gateway may only have lost this model
            self.prefixes.lost(gateway_at_site(process_id))

    def answered(self, worker_id: str, sent_at: float, *, is_taken: bool) -> None:
        """Takes in whether a worker has taken a request that was sent to it."""
        site = site_in(worker_id)
        if site is None:
            return
        if is_taken:
            self._unwilling.taken(site)
            return
        closed_s = self._unwilling.not_taken(site, sent_at, self._clock.now())
        if closed_s is not None:
            log.warning("site_closed", site=site, seconds=closed_s)

    def _take_digest(self, digest: PrefixDigest) -> None:
        """Takes in a digest. Refuses, and counts, one whose class excludes the site."""
        site = site_in(digest.gateway_id) or ""
        regions = self._refusals.classes.allowed(digest.region_class, None)
        region = self._region_of(site)
        if regions is not None and region not in regions:
            self.prefixes.withdraw(site, digest.region_class)
            if region is not None:  # else its first state comes later
                self._refusals.count("site", "", region)
            return
        self.prefixes.take(digest, self._clock.now())

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            with failing_alone("site_prefixes_not_swept"):
                self.prefixes.drop_silent(self._clock.now())

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    def serving(
        self, ticket: QueuedRequest, now: float, *, is_served_here: Callable[[], bool]
    ) -> ModelWorkers | None:
        """Returns the sites for a request that found no room here, or None if it waits here."""
        if ticket.request.origin_site:
            return None
        elsewhere = self._workers.serving_elsewhere(ticket.queue.served)
        if elsewhere is None:
            return None
        may_leave = not ticket.is_queueable or leaves_home(
            now - ticket.queued_at,
            self._workers.nearest_site_s(ticket.queue.served, now),
            prompt_s(self._workers.serving(ticket.queue.served), size_of(ticket).num_tokens),
            is_served_here=is_served_here(),
        )
        return elsewhere if may_leave else None

    def num_cached_blocks(self, request: Request) -> dict[str, int]:
        """Returns the blocks of the prompt that each worker's site holds, of sites that may have
        it. The gateways of a site share what its workers hold.
        """
        allowed = request.allowed_regions
        return {
            worker_id: num_blocks
            for site, num_blocks in self.prefixes.num_blocks(request).items()
            for worker_id in self._workers_of.get(site, ())
            if not allowed or self._workers.region_of(worker_id) in allowed
        }

    def closed(self, now: float) -> set[str]:
        """Returns the workers at sites that get no request now: they count as busy."""
        sites = self._unwilling.closed(now)
        return set().union(*(self._workers_of.get(each, ()) for each in sites))
