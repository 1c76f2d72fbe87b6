"""Runs this worker's handoffs: requests prefills, renews their leases, aborts failed attempts.

A prefill at another site is requested of a gateway there. This worker receives no heartbeats of
that site: the reply to each renewed lease shows that the site is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from services.decode.avoided_sites import AvoidedSites
from services.decode.handoff import Handoff
from services.decode.running_request import RunningRequest
from shared.background import Background, is_logged, item_error
from shared.engine.kv.ports import ReceivePort
from shared.engine.worker import EngineWorker
from shared.errors import HearthError, OutsideRegions, WorkerBusy
from shared.messages import (
    AbortRequest,
    Done,
    ImageParts,
    PrefillAccepted,
    PrefillPhases,
    RenewLease,
    RunPrefill,
    SitePushes,
    WorkerLoad,
)
from shared.packing import pack_hashes, pack_token_ids
from shared.sites.kv_targets import targets_for_sites
from shared.subjects import at_site, control, is_at_site, run_prefill, site_in

log = structlog.get_logger(__name__)

PREFILL_ACK_S = 0.25  # plus the round trip
PREFILL_LEASE_S = 3.0
SITE_REPLY_S = 0.5  # of a gateway of another site, plus the round trip


def images_within(images: ImageParts, num_tokens: int) -> ImageParts:
    """Returns the images that begin within the first `num_tokens` of a prompt."""
    return tuple(each for each in images if each.first_token < num_tokens)


class ActiveHandoffs:
    def __init__(
        self,
        worker: EngineWorker,
        port: ReceivePort,
        on_ended: Callable[[RunningRequest, Handoff, int], None],
        on_failed: Callable[[RunningRequest], None],
        *,
        site: str = "",
    ) -> None:
        """Each handoff ends with a call of `on_ended(placement, handoff, num_held_tokens)`; if that
        raises, of `on_failed(placement)`. `site` is the name of this site for others; without one
        no other site computes prompts for this worker.
        """
        self._worker = worker
        self._port = port
        self._on_ended = on_ended
        self._on_failed = on_failed
        self._site = site
        self._site_pushes: dict[str, SitePushes] = {}
        self._avoided_sites = AvoidedSites()
        self._renewing: set[str] = set()  # gateways of other sites whose reply is awaited
        self._background = Background()
        self._under_way: dict[Handoff, None] = {}
        self._awaiting_phases: dict[bytes, RunningRequest] = {}  # key: id of the prefill
        self._num_accepted = 0
        self._num_failed = 0
        self._ack_s = 0.0

    def counted(self, load: WorkerLoad) -> WorkerLoad:
        return msgspec.structs.replace(
            load,
            num_handoffs_in_flight=len(self._under_way),
            num_handoffs=self._num_accepted,
            num_failed_handoffs=self._num_failed,
            handoff_ack_s=self._ack_s,
            site_pushes=tuple(self._site_pushes.values()),
        )

    def start(self, placement: RunningRequest, candidates: tuple[str, ...]) -> None:
        usable = tuple(each for each in candidates if self._may_request(placement, each))
        handoff = placement.handoff = self._handoff(placement, usable)
        self._under_way[handoff] = None
        self._background.start_item(
            self._run(placement, handoff), lambda _: self._on_failed(placement)
        )

    async def stop(self) -> None:
        """Waits for the running handoffs, cancelled by the caller, then closes the port."""
        await self._background.idle()
        await self._port.close()

    def fail_worker(self, worker_id: str, reason: str) -> None:
        """Fails the handoffs from a worker. Its link key is not used again: its next
        process gets another.
        """
        self._port.forget_worker(worker_id)
        for handoff in list(self._under_way):
            if handoff.current is not None and handoff.current[0] == worker_id:
                handoff.fail(reason)

    def fail_try(self, placement_id: bytes, reason: str) -> None:
        for handoff in list(self._under_way):
            if handoff.current is not None and handoff.current[1] == placement_id:
                handoff.fail(reason)

    def take_phases(self, phases: PrefillPhases) -> None:
        """Records the phases of a prefill. Ignores those of an ended placement, or of an
        earlier attempt.
        """
        placement = self._awaiting_phases.pop(phases.placement_id, None)
        if placement is not None:
            placement.times.prefill = phases
            self._count_site_push(placement, phases)

    def forget(self, placement: RunningRequest) -> None:
        """Forgets the phases of a placement that has ended. Idempotent."""
        if placement.prefill_id is not None:
            self._awaiting_phases.pop(placement.prefill_id, None)
            placement.prefill_id = None

    def renew_leases(self) -> None:
        by_worker: dict[str, list[bytes]] = {}
        for handoff in self._under_way:
            if handoff.lease is not None and not handoff.is_cancelled:
                worker_id, placement_id = handoff.lease
                by_worker.setdefault(worker_id, []).append(placement_id)
        for worker_id, placement_ids in by_worker.items():
            message = RenewLease(
                decode_worker_id=self._name_for(worker_id),
                placement_ids=tuple(placement_ids),
                lease_s=PREFILL_LEASE_S,
            )
            if not is_at_site(worker_id):
                self._worker.outbox.post(control("prefill", worker_id), message)
            elif worker_id not in self._renewing:
                self._renewing.add(worker_id)
                self._background.start_item(self._renew_at_site(worker_id, message), is_logged)

    async def _renew_at_site(self, worker_id: str, message: RenewLease) -> None:
        """Renews leases at another site. Fails the handoffs from there if it does not reply."""
        try:
            await self._worker.health_monitor.requests.request(
                worker_id, run_prefill(worker_id), message, Done, base_s=SITE_REPLY_S
            )
        except HearthError as error:
            self.fail_worker(worker_id, f"{worker_id} does not renew: {error.message}")
        finally:
            self._renewing.discard(worker_id)

    def _name_for(self, worker_id: str) -> str:
        """Returns the name by which a prefill worker knows this one."""
        own = self._worker.worker_id
        return at_site(self._site, own) if is_at_site(worker_id) else own

    def _count_site_push(self, placement: RunningRequest, phases: PrefillPhases) -> None:
        """Counts KV that came over a link. A site cannot claim more bytes than its prompt has."""
        site, delivery = site_in(phases.prefill_worker_id), placement.delivery
        if site is None or not phases.link_s or delivery is None:
            return
        num_tokens = delivery.num_pushed_tokens
        most = num_tokens * self._worker.served.card.kv_bytes_per_token
        before = self._site_pushes.get(site, SitePushes(site))
        self._site_pushes[site] = SitePushes(
            site,
            num_tokens=before.num_tokens + num_tokens,
            num_bytes=before.num_bytes + min(phases.num_pushed_bytes, most),
            link_s=before.link_s + phases.link_s,
        )

    def _handoff(self, placement: RunningRequest, candidates: tuple[str, ...]) -> Handoff:
        return Handoff(
            placement.prompt,
            candidates,
            port=self._port,
            block_size=self._worker.loop.executor.kv_layout.block_size,
            randomness=self._worker.randomness,
            request_prefill=lambda worker_id, placement_id, first_token: self._request_prefill(
                placement, worker_id, placement_id, first_token
            ),
            abandon=self._abandon,
            region_of=partial(self._region_of, placement),
            regions=placement.regions,
            on_outside=partial(self._count_outside, placement),
        )

    async def _run(self, placement: RunningRequest, handoff: Handoff) -> None:
        num_held = placement.prompt.num_computed_tokens
        try:
            await self._worker.loop.zero_freed_blocks()  # frames are written into them next
            placement.delivery = await handoff.run()
            num_held = placement.delivery.num_held_tokens
            if placement.delivery.prefill_worker_id is not None:
                placement.times.complete_at = self._worker.clock.now()
        except BaseException as raised:  # outermost handler: local prefill is always possible
            item_error(raised)
            log.exception("handoff_crashed")
        finally:
            del self._under_way[handoff]
            self._num_failed += len(handoff.failed_workers)
            self._record_sites(placement, handoff)
        placement.handoff = None
        self._on_ended(placement, handoff, num_held)

    def _may_request(self, placement: RunningRequest, worker_id: str) -> bool:
        site, now = site_in(worker_id), self._worker.clock.now()
        if site is not None and (not self._site or self._avoided_sites.is_avoided(site, now)):
            return False
        region = self._region_of(placement, worker_id) or ""
        try:
            self._worker.refusals.check(
                "decode", placement.request.tenant_id, placement.regions, region
            )
        except OutsideRegions:
            return False
        return True

    def _region_of(self, placement: RunningRequest, worker_id: str) -> str | None:
        """Returns the region of a prefill worker; None: not known."""
        if is_at_site(worker_id):
            return placement.site_regions.get(worker_id)
        return self._worker.region_of(worker_id)

    def _count_outside(self, placement: RunningRequest, worker_id: str) -> None:
        region = self._region_of(placement, worker_id) or ""
        self._worker.refusals.count("kv_receive", placement.request.tenant_id, region)

    def _record_sites(self, placement: RunningRequest, handoff: Handoff) -> None:
        """Records which sites have failed to compute the prompt, and which one has."""
        for site in filter(None, map(site_in, handoff.failed_workers)):
            self._avoided_sites.failed(site, self._worker.clock.now())
        delivery = placement.delivery
        if delivery is not None and delivery.prefill_worker_id is not None:
            self._avoided_sites.succeeded(site_in(delivery.prefill_worker_id) or "")

    async def _request_prefill(
        self, placement: RunningRequest, worker_id: str, placement_id: bytes, first_token: int
    ) -> PrefillAccepted:
        """Requests a prefill. Raises HearthError if the prefill worker rejects the command or
        does not reply.
        """
        if self._worker.health_monitor.fleet.is_lost(worker_id):
            raise WorkerBusy(f"{worker_id} is not alive")
        worker, request, prompt = self._worker, placement.request, placement.prompt
        targets, ack_s = self._port.targets, PREFILL_ACK_S
        if is_at_site(worker_id):  # its gateway asks a worker there
            targets, ack_s = targets_for_sites(targets), PREFILL_ACK_S + SITE_REPLY_S
        command = RunPrefill(
            placement_id=placement_id,
            tenant_id=request.tenant_id,
            decode_worker_id=self._name_for(worker_id),
            model=request.model,
            revision=request.revision,
            kv_format=worker.served.card.kv_format,
            cache_root=request.cache_root,
            token_ids=pack_token_ids(prompt.token_ids[: prompt.num_prefill_tokens]),
            block_hashes=pack_hashes(prompt.block_hashes),
            num_public_blocks=prompt.num_public_blocks,
            first_token=first_token,
            kv_quota_tokens=request.kv_quota_tokens,
            is_zero_retention=prompt.is_zero_retention,
            targets=targets,
            lease_s=PREFILL_LEASE_S,
            deadline_s=max(0.0, placement.deadline_at - worker.clock.now()),
            link_key=self._port.link_key(worker_id, self._region_of(placement, worker_id)),
            public_root=request.public_root,
            numerics=worker.served.card.numerics,
            request_id=request.request_id,
            needs=request.needs,
            traceparent=request.traceparent,
            images=images_within(request.images, prompt.num_prefill_tokens),
            gateway_id=request.gateway_id,
            allowed_regions=request.allowed_regions,
            region_class=request.region_class,
            target_region=worker.refusals.region,
        )
        self.forget(placement)
        placement.prefill_id = placement_id
        self._awaiting_phases[placement_id] = placement
        requested_at = worker.clock.now()
        accepted = await worker.health_monitor.requests.request(
            worker_id, run_prefill(worker_id), command, PrefillAccepted, base_s=ack_s
        )
        self._num_accepted += 1
        placement.times.accepted_at = worker.clock.now()
        self._ack_s += placement.times.accepted_at - requested_at
        return accepted

    def _abandon(self, worker_id: str, placement_id: bytes) -> None:
        message = AbortRequest(placement_id=placement_id, reason="superseded")
        self._worker.outbox.post(control("prefill", worker_id), message)
