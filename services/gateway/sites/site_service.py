"""Serves requests of other sites, and tells these sites what this one can take over.

A scheduler of another site sends StartDecode; this gateway submits the request at its own site as
one of its own, and sends the tokens to the gateway that owns the request. So its workers, their
prefix cache and their recovery stay this site's, and the request itself stays the other's: when the
link is cut, its gateway continues it elsewhere with all tokens received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

import structlog
from msgspec import structs

from services.gateway.sites.prefix_digests import PrefixDigests
from services.gateway.sites.site_placements import SitePlacements
from services.gateway.sites.site_prefills import SitePrefills
from services.gateway.sites.site_requests import (
    PromptAllowances,
    checked_regions,
    may_retain_class,
    narrowed,
    num_tokens_of,
    site_request,
    tenant_here,
)
from services.gateway.sites.site_tenants import SiteTenants
from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.stream_driver import StreamDriver
from shared.background import Background, failing_alone, is_logged
from shared.clock import Clock
from shared.config import GatewayConfig, weights_of_sites
from shared.errors import HearthError
from shared.lifecycle.health import SITE_INTERVAL_S, Loss
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AbortRequest,
    AckFinished,
    Alive,
    DecodeStarted,
    ReadSiteModels,
    ReportAlive,
    Request,
    ResendTokens,
    SiteModels,
    SiteState,
    StartDecode,
    TokenBatch,
)
from shared.secrets.root_key import root_key_of
from shared.secrets.secret import Derived
from shared.sites.gateway_epochs import site_instance
from shared.sites.linked_sites import LinkedSites
from shared.sites.site_states import (
    COUNTERS_EVERY,
    ModelState,
    models_id,
    site_models,
    worker_at_site,
)
from shared.sites.tenant_names import SiteTenantNames
from shared.subjects import at_site, from_sites, is_at_site, site_in, state_to_sites, tokens
from shared.tenancy.tenant_copy import SigningKey
from shared.transport.bus import Bus
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
MAX_DOUBLED = 64
OTHERS_SHARE = 2  # half of a gateway's requests may be those of other sites


class SiteService:
    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        clock: Clock,
        health_monitor: HealthMonitor,
        driver: StreamDriver,
        linked: LinkedSites,
        *,
        check_capacity: Callable[[], None],
        tenants: SiteTenants | None = None,
    ) -> None:
        """`check_capacity` raises the error with which this gateway rejects a request now.
        `tenants` are those over sites, or None.
        """
        self._config = config
        self._bus = bus
        self._clock = clock
        self._health_monitor = health_monitor
        self._driver = driver
        self._check_capacity = check_capacity
        self._name = at_site(config.site, config.process_id)
        self._root_key = root_key_of(config.secret("cluster_secret"))
        self._keys = Derived(config.secret("cluster_secret"), SigningKey.of_secret)
        self._weights = weights_of_sites(config.linked_site)
        self._tenants: dict[str, SiteTenantNames] = {}  # by site
        self._placements = SitePlacements(
            self._flush_soon,
            max_held=max(1, config.max_requests // OTHERS_SHARE),
            is_waiting=driver.is_waiting,
        )
        self._outbox = Outbox(bus)
        self._allowances = PromptAllowances()
        self._prefills = SitePrefills(
            config,
            bus,
            clock,
            health_monitor,
            self._outbox,
            self._allowances,
            region_of=linked.region_of,
        )
        self._background = Background()
        self._heard_at: dict[str, float] = {}  # by gateway of another site with requests here
        self._linked = linked
        self._over_sites = tenants
        self._digests = PrefixDigests(self._name, bus, clock, health_monitor)
        self._will_flush = self._will_report = False
        self._num_states = 0
        self._models_id = b""  # of the last state

    async def start(self) -> None:
        own = self._bus.process_id
        await self._linked.start(self._health_monitor, self._on_state)
        self._outbox.start()
        await self._bus.serve(from_sites("decode", own, "start"), StartDecode, self._start_decode)
        await self._bus.serve(from_sites("decode", own, "resend"), ResendTokens, self._resend)
        await self._bus.serve(from_sites("decode", own, "alive"), ReportAlive, self._alive)
        read = from_sites("gateway", own, "models")
        await self._bus.serve(read, ReadSiteModels, self._read_models)
        control = from_sites("decode", own, "control")
        await self._bus.subscribe(control, AbortRequest | AckFinished, self._on_control)
        await self._bus.subscribe(
            from_sites("gateway", own, "tokens"), TokenBatch, self._driver.take_tokens
        )
        await self._prefills.start()
        if self._over_sites is not None:
            self._over_sites.on_withdrawn(self._digests.withdraw)
            await self._over_sites.start()
        self._health_monitor.on_lost(self._on_lost)
        self._background.start_own(self._report())
        self._background.start_own(self._sweep())
        self._background.start_own(self._digests.run())

    async def leave(self) -> None:
        """Announces that this gateway drains: other sites send no more requests."""
        await self._send_state()

    async def stop(self) -> None:
        """Ends what is left of other sites' requests, which then continue elsewhere."""
        await self._background.stop()
        await self._linked.stop()
        if self._over_sites is not None:
            await self._over_sites.stop()
        self._flush()
        await self._send_state(is_last=True)
        await self._outbox.stop()

    # ── the state of this site ───────────────────────────────────────────────────────────────────

    async def _report(self) -> None:
        while True:
            with failing_alone("site_state_not_sent"):
                await self._send_state()
            await self._clock.sleep(SITE_INTERVAL_S)

    async def _send_state(self, *, is_last: bool = False) -> None:
        self._num_states += 1
        models = () if is_last else self._models()
        digest, before = models_id(each.model for each in models), self._models_id
        has_counters = digest != before or self._num_states % COUNTERS_EVERY == 0
        self._models_id, keys = digest, (each.public for each in self._keys.accepted)
        state = SiteState(
            gateway_id=self._name,
            epoch=self._health_monitor.epoch,
            sequence_number=self._num_states,
            region=self._config.region,
            models_id=digest,
            loads=tuple(each.load for each in models),
            counters=tuple(each.counters for each in models) if has_counters else (),
            is_draining=self._health_monitor.state == "draining",
            instance=site_instance(keys, self._bus.server_name),
            doubled=self._linked.doubled()[:MAX_DOUBLED],
        )
        try:
            await self._bus.publish(state_to_sites(self._bus.process_id), state)
        except HearthError as error:
            log.warning("site_state_not_sent", error=error.message)

    def _models(self) -> tuple[ModelState, ...]:
        """Returns what this gateway takes over from other sites, or has taken over if it drains."""
        if self._health_monitor.state not in ("ready", "draining"):
            return ()
        fleet = self._health_monitor.fleet
        return site_models(fleet, offers_prefill=self._prefills.are_offered)

    def _read_models(self, _: ReadSiteModels) -> SiteModels:
        models = tuple(each.model for each in self._models())
        return SiteModels(gateway_id=self._name, models_id=models_id(models), models=models)

    def _on_lost(self, process_id: str, loss: Loss) -> None:
        """Reports the losses of one turn of the loop once: a host may take many workers along."""
        if not is_at_site(process_id) and not self._will_report:
            self._will_report = True
            self._background.start_item(self._report_loss(), is_logged)

    async def _report_loss(self) -> None:
        self._will_report = False
        await self._send_state()

    def _on_state(self, state: SiteState) -> None:
        if self._over_sites is not None:
            self._over_sites.observe(state)
        if state.gateway_id in self._heard_at:
            self._heard_at[state.gateway_id] = self._clock.now()
        self._digests.on_state(state)

    def _alive(self, _: ReportAlive) -> Alive:
        monitor = self._health_monitor
        return Alive(epoch=monitor.epoch, host="", uptime_s=monitor.uptime_s)

    # ── requests of other sites ──────────────────────────────────────────────────────────────────

    def _start_decode(self, command: StartDecode) -> DecodeStarted:
        placement_id, asked = command.placement_id, command.request
        if placement_id not in self._placements:
            site, refusals = site_in(asked.gateway_id) or "", self._health_monitor.refusals
            checked_regions(asked, refusals, self._linked.region_of(site))
            self._check_capacity()
            self._placements.check_room(asked.gateway_id)  # before the prompt is hashed
            now = self._clock.now()
            self._allowances.check(site, num_tokens_of(asked), now)
            request = self._request(command)
            worker_id = worker_at_site(self._name, asked.model, asked.revision, asked.block_size)
            self._heard_at[asked.gateway_id] = now
            computed = partial(self._digests.computed, asked, request)
            receiver = self._placements.open(command, request, worker_id, now, on_computed=computed)
            self._driver.open([Opening(request, receiver, is_queueable=command.is_queueable)])
            self._linked.count(asked.gateway_id, "num_served")
        return DecodeStarted(placement_id=placement_id, num_cached_tokens=0)

    def _request(self, command: StartDecode) -> Request:
        asked, own = command.request, self._bus.process_id
        fleet = self._health_monitor.fleet
        here = [each for each in fleet.everyone() if not is_at_site(each.process_id)]
        regions = {self._config.region, *(each.region for each in here)}
        workers = (each for each in fleet.live("decode") if not is_at_site(each.process_id))
        request = narrowed(asked, workers, regions)
        site = site_in(asked.gateway_id) or ""
        tenant_id = tenant_here(asked)
        # of a site with many tenants, the further ones share names; their blocks are apart
        name = self._tenants.setdefault(site, SiteTenantNames()).of(tenant_id)
        made = site_request(
            request,
            command.placement_id,
            own,
            self._root_key(),
            weight=self._weights.get(site, 1.0),
            retains_class=name == tenant_id and self._may_retain_class(asked),
        )
        deadline_s = min(made.deadline_s, self._config.request_timeout_s)
        return structs.replace(made, deadline_s=deadline_s, tenant_id=name)

    def _may_retain_class(self, asked: Request) -> bool:
        monitor = self._health_monitor
        indexes = (each.region for each in monitor.fleet.live("kv_index"))
        receives_orders = self._over_sites is not None
        return receives_orders and may_retain_class(asked, monitor.refusals.classes, indexes)

    def _resend(self, command: ResendTokens) -> TokenBatch:
        worker_id, entry = self._placements.resend(
            command.placement_id,
            command.choice_index,
            command.from_position,
            region_class=command.region_class,
        )
        return TokenBatch(worker_id=worker_id, entries=(entry,), region_class=command.region_class)

    def _on_control(self, message: AbortRequest | AckFinished) -> None:
        match message:
            case AckFinished(placement_ids=placement_ids):
                for placement_id in placement_ids:
                    self._close(self._placements.close(placement_id))
            case AbortRequest(placement_id=placement_id, choice_index=None):
                self._close(self._placements.close(placement_id))
            case AbortRequest(placement_id=placement_id, choice_index=int(choice_index)):
                self._close(self._placements.close_choice(placement_id, choice_index))

    def _close(self, request_id: str | None) -> None:
        if request_id is not None:
            error = HearthError("another site ended the request")
            self._driver.close(request_id, "client_gone", error)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _flush_soon(self) -> None:
        """Sends what this turn of the loop adds in one message for each gateway."""
        if not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        for gateway_id, batch in self._placements.take(self._clock.now()):
            self._outbox.post(tokens(gateway_id), batch)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            now = self._clock.now()
            with failing_alone("site_placements_not_swept"):
                for placement_id in self._placements.overdue(self._heard_since, now):
                    self._close(self._placements.close(placement_id))
                self._placements.resend_overdue(now)
                self._prefills.expire(now)
                here = self._placements.gateways()
                self._heard_at = {each: at for each, at in self._heard_at.items() if each in here}

    def _heard_since(self, gateway_id: str) -> float:
        return self._heard_at.get(gateway_id, -inf)
