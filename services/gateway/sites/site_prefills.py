"""Prefills for other sites: this gateway chooses a worker of its site and stands between the two.

    decode (site a) ──RunPrefill──▶ gateway ──RunPrefill──▶ prefill worker
       ▲  ◀──PrefillFailed, PrefillPhases── gateway ◀──────────┘   │
       └═══════════════════════════ KV frames ═════════════════════┘

To the prefill worker this gateway is the decode worker, so no worker here sends or receives
anything over a link but KV. A relay lives under the lease of the decode worker, as a prefill does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
from msgspec import structs

from services.gateway.sites.prefill_requests import (
    MAX_LEASE_S,
    check_prefill,
    chosen_prefill,
    site_prefill,
)
from services.gateway.sites.site_requests import (
    PromptAllowances,
    checked_regions,
    num_tokens_of,
)
from shared.allowance import has_place
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import HearthError, UnknownPlacement, WorkerBusy
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AbortRequest,
    Done,
    PrefillAccepted,
    PrefillFailed,
    PrefillPhases,
    RenewLease,
    RunPrefill,
)
from shared.secrets.root_key import root_key_of
from shared.sites.kv_targets import networks_of
from shared.sites.site_states import worker_at_site
from shared.subjects import at_site, control, from_sites, run_prefill, site_in
from shared.telemetry.log_limit import LogLimit
from shared.transport.bus import Bus, failure_of
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

ACK_S = 0.25  # plus the round trip within this site
MAX_RELAYS = 64  # of all other sites


@dataclass(frozen=True, slots=True)
class Relay:
    """A prefill of the worker `worker_id` here, for a decode worker of another site, which knows
    this gateway as `name`.
    """

    decode_id: str
    worker_id: str
    name: str
    num_tokens: int
    lease_until: float


class SitePrefills:
    """Prefills for other sites. Closed, if the operator names no networks for their KV."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        clock: Clock,
        health_monitor: HealthMonitor,
        outbox: Outbox,
        allowances: PromptAllowances,
        *,
        region_of: Callable[[str], str | None] = lambda site: None,
    ) -> None:
        """`region_of` a site is that of its link; None before its first state."""
        self._region_of = region_of
        self._bus = bus
        self._clock = clock
        self._health_monitor = health_monitor
        self._outbox = outbox
        self._name = at_site(config.site, config.process_id)
        self._root_key = root_key_of(config.secret("cluster_secret"))
        self._networks = networks_of(config.kv_networks)
        self._max_deadline_s = config.request_timeout_s
        self._relays: dict[bytes, Relay] = {}
        self._allowances = allowances
        self._log_limit = LogLimit(clock.now)

    @property
    def are_offered(self) -> bool:
        return bool(self._networks)

    async def start(self) -> None:
        if not self._networks:
            return
        own = self._bus.process_id
        run = from_sites("prefill", own, "run")
        await self._bus.serve(run, RunPrefill | RenewLease, self._serve)
        await self._bus.subscribe(
            from_sites("prefill", own, "control"), AbortRequest, self._on_abort
        )
        results = PrefillFailed | PrefillPhases
        await self._bus.subscribe(control("decode", own), results, self._on_result)
        self._health_monitor.on_lost(lambda process_id, _: self._on_lost(process_id))

    async def _serve(self, command: RunPrefill | RenewLease) -> PrefillAccepted | Done:
        if isinstance(command, RenewLease):
            self._renew(command)
            return Done()
        if command.placement_id not in self._relays:
            await self._run(command)
        return PrefillAccepted(placement_id=command.placement_id)

    async def _run(self, command: RunPrefill) -> None:
        """Has a worker compute the prompt. Raises WorkerBusy, InvalidRequest and the worker's
        errors.
        """
        placement_id, decode_id = command.placement_id, command.decode_worker_id
        try:
            regions = self._check(command)
            workers = self._health_monitor.fleet.live("prefill")
            worker = chosen_prefill(command, workers, self._relayed_tokens(), regions)
        except HearthError as error:
            site, reason = site_in(decode_id) or "", error.message
            self._log_limit.write(
                log.warning, "site_prefill_rejected", site, decode=decode_id, reason=reason
            )
            raise
        card = worker.model
        assert card is not None, "it was chosen by its card"
        served = card.name, card.revision, card.block_size
        self._relays[placement_id] = Relay(
            decode_id,
            worker.process_id,
            worker_at_site(self._name, *served, "prefill"),
            num_tokens_of(command),
            self._clock.now() + min(command.lease_s, MAX_LEASE_S),
        )
        message = site_prefill(
            command,
            self._bus.process_id,
            self._root_key(),
            block_size=card.block_size,
            max_deadline_s=self._max_deadline_s,
            target_region=self._region_of(site_in(decode_id) or "") or "",
        )
        worker_id = worker.process_id
        try:
            await self._health_monitor.requests.request(
                worker_id, run_prefill(worker_id), message, PrefillAccepted, base_s=ACK_S
            )
        except BaseException:
            self._abort(placement_id)
            raise

    def _check(self, command: RunPrefill) -> frozenset[str] | None:
        """Returns the regions that may have the prompt; None: all. Raises HearthError."""
        site, now = site_in(command.decode_worker_id) or "", self._clock.now()
        state, num_relays = self._health_monitor.state, len(self._relays)
        num_own = sum(site_in(each.decode_id) == site for each in self._relays.values())
        if state != "ready" or not has_place(num_own, num_relays, MAX_RELAYS):
            raise WorkerBusy(f"{self._name} is {state}, with {num_relays} prefills of other sites")
        regions = checked_regions(command, self._health_monitor.refusals, self._region_of(site))
        check_prefill(command, self._networks)
        self._allowances.check(site, num_tokens_of(command), now)
        return regions

    def _relayed_tokens(self) -> Counter[str]:
        tokens = Counter[str]()
        for each in self._relays.values():
            tokens[each.worker_id] += each.num_tokens
        return tokens

    def _renew(self, command: RenewLease) -> None:
        """Renews the leases of a decode worker; others' and unknown ones fail."""
        until = self._clock.now() + min(command.lease_s, MAX_LEASE_S)
        by_worker: dict[str, list[bytes]] = {}
        for placement_id in command.placement_ids:
            relay = self._relays.get(placement_id)
            if relay is None or relay.decode_id != command.decode_worker_id:
                error = UnknownPlacement("this site does not hold that prefill")
                self._send_failed(command.decode_worker_id, self._name, placement_id, error)
                continue
            self._relays[placement_id] = replace(relay, lease_until=until)
            by_worker.setdefault(relay.worker_id, []).append(placement_id)
        for worker_id, placement_ids in by_worker.items():
            message = RenewLease(
                decode_worker_id=self._bus.process_id,
                placement_ids=tuple(placement_ids),
                lease_s=min(command.lease_s, MAX_LEASE_S),
            )
            self._outbox.post(control("prefill", worker_id), message)

    def _on_abort(self, message: AbortRequest) -> None:
        self._abort(message.placement_id)

    def _abort(self, placement_id: bytes) -> None:
        relay = self._relays.pop(placement_id, None)
        if relay is not None:
            message = AbortRequest(placement_id=placement_id, reason="superseded")
            self._outbox.post(control("prefill", relay.worker_id), message)

    def _on_result(self, message: PrefillFailed | PrefillPhases) -> None:
        """Passes the end of a prefill on."""
        relay = self._relays.get(message.placement_id)
        if relay is None or relay.worker_id != message.prefill_worker_id:
            return
        del self._relays[message.placement_id]
        renamed = structs.replace(message, prefill_worker_id=relay.name)
        self._outbox.post(control("decode", relay.decode_id), renamed)

    def _on_lost(self, process_id: str) -> None:
        lost = [each for each, relay in self._relays.items() if relay.worker_id == process_id]
        for placement_id in lost:
            relay = self._relays.pop(placement_id)
            error = WorkerBusy(f"the prefill worker {process_id} is lost")
            self._send_failed(relay.decode_id, relay.name, placement_id, error)

    def expire(self, now: float) -> None:
        """Forgets prefills without a lease: the worker ends its own at the same time."""
        expired = [each for each, relay in self._relays.items() if now > relay.lease_until]
        for placement_id in expired:
            self._abort(placement_id)

    def _send_failed(
        self, decode_id: str, name: str, placement_id: bytes, error: HearthError
    ) -> None:
        message = PrefillFailed(
            placement_id=placement_id, prefill_worker_id=name, failure=failure_of(error)
        )
        self._outbox.post(control("decode", decode_id), message)
