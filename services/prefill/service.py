"""The prefill handlers: compute the KV of a prompt and push it to the requesting decode worker.

A prefill lives under a lease that decode renews. A prefill ends when its KV is acknowledged, when
decode aborts it, when its lease or deadline expires, or when the link is lost; its blocks are freed
in every case.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import structlog

from shared.background import Background, failing_alone, is_logged, item_error
from shared.engine.batching.sequence import Sequence, build_sequence
from shared.engine.engine import StepProgress
from shared.engine.kv.ports import Push, PushPort
from shared.engine.vision.sequence_images import WantedImages
from shared.engine.worker import EngineWorker
from shared.errors import (
    HearthError,
    InvalidRequest,
    OutsideRegions,
    UnknownPlacement,
    WorkerBusy,
)
from shared.kv_wire.link import PushBounds
from shared.kv_wire.ports.push_plan import kv_links
from shared.messages import (
    MAX_DURATION_S,
    AbortRequest,
    PrefillAccepted,
    PrefillFailed,
    PrefillPhases,
    RenewLease,
    RunPrefill,
    WorkerLoad,
)
from shared.packing import unpack_token_ids
from shared.subjects import control, run_prefill
from shared.transport.bus import failure_of

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
MAX_QUEUED_PREFILLS = 256


@dataclass(slots=True)
class Prefill:
    request: RunPrefill
    sequence: Sequence
    push: Push
    images: tuple[WantedImages, ...]
    lease_until: float
    deadline_at: float
    accepted_at: float
    first_step_at: float | None = None
    computed_at: float = 0.0  # the last step


class PrefillService:
    def __init__(self, worker: EngineWorker, port: PushPort) -> None:
        self._worker = worker
        self._port = port
        self._prefills: dict[bytes, Prefill] = {}
        self._background, self._pushing = Background(), Background()

    async def start(self) -> None:
        self._worker.count(self._counted)
        worker_id, bus = self._worker.worker_id, self._worker.bus
        self._worker.loop.listen(self._on_step)
        await bus.subscribe(
            control("prefill", worker_id), AbortRequest | RenewLease, self._on_control
        )
        await bus.serve(run_prefill(worker_id), RunPrefill, self._run_prefill)
        self._background.start_own(self._sweep())

    @property
    def num_unfinished(self) -> int:
        """Prefills that are computed or pushed."""
        return len(self._prefills)

    @property
    def num_pushes(self) -> int:
        return len(self._prefills)

    def hand_over(self) -> None:
        """Does nothing: a decode worker that is sent less KV computes the prompt again, later."""

    async def drain(self) -> None:
        """Waits for all prefills, so that decode still receives their KV."""
        await self._pushing.idle()

    async def stop(self) -> None:
        await self._background.stop()
        for prefill in self._prefills.values():
            prefill.push.cancel()
        await self.drain()
        await self._port.close()

    def _run_prefill(self, request: RunPrefill) -> PrefillAccepted:
        if request.placement_id in self._prefills:
            return PrefillAccepted(placement_id=request.placement_id)
        bounds = self._check(request)
        request = self._worker.tenant_kv.unretained.current(request)
        sequence = _sequence_of(request, self._worker.served.card.block_size)
        sequence.region_class = self._worker.announced.class_of(request)
        self._worker.check_tokens(sequence)
        self._worker.check_hashes(request, request.token_ids)
        images = self._worker.attach_images(request, request.token_ids, (sequence,))
        self._worker.loop.engine.add(sequence)
        try:
            push = self._port.start(
                request.placement_id,
                sequence,
                first_token=request.first_token,
                targets=request.targets,
                link_key=request.link_key,
                bounds=bounds,
            )
        except BaseException as raised:
            item_error(raised)
            self._worker.loop.engine.release(sequence)
            raise
        now = self._worker.clock.now()
        self._prefills[request.placement_id] = Prefill(
            request,
            sequence,
            push,
            images,
            lease_until=now + request.lease_s,
            deadline_at=now + request.deadline_s,
            accepted_at=now,
        )
        self._pushing.start_item(self._deliver(request, sequence, push), is_logged)
        self._worker.loop.wake()
        return PrefillAccepted(placement_id=request.placement_id)

    def _check(self, request: RunPrefill) -> PushBounds | None:
        """Returns where the KV may go; None: anywhere. Raises InvalidRequest, WorkerBusy."""
        self._worker.check_accepting("prefill")
        bounds = self._bounds(request)
        if len(self._prefills) >= MAX_QUEUED_PREFILLS:
            raise WorkerBusy(f"{self._worker.worker_id} has {len(self._prefills)} prefills")
        self._worker.check_model(request.model, request.revision)
        self._worker.check_needs(request.needs)
        self._worker.check_kv(request.kv_format, request.numerics)
        self._worker.check_kv_targets(request)
        return bounds

    def _bounds(self, request: RunPrefill) -> PushBounds | None:
        """Checks the regions of both ends. A gateway, which stands for a decode worker of another
        site, has checked the region that it states.
        """
        refusals, decode_id = self._worker.refusals, request.decode_worker_id
        if refusals.require("prefill", request) is None:
            return None
        region = self._worker.region_of(decode_id)
        if self._worker.is_gateway(decode_id):
            region = request.target_region
        regions = refusals.require("prefill", request, region or "")
        return None if regions is None else PushBounds(regions, region or "")

    async def _deliver(self, request: RunPrefill, sequence: Sequence, push: Push) -> None:
        try:
            if await push.run():
                self._send_phases(self._prefills[request.placement_id])
        except HearthError as error:
            if isinstance(error, OutsideRegions):
                region = request.target_region
                self._worker.refusals.count("kv_push", request.tenant_id, region)
            log.warning("push_failed", error=error.message, decode=request.decode_worker_id)
            self._send_failed(request.decode_worker_id, request.placement_id, error)
        except BaseException as raised:  # outermost handler
            failure = item_error(raised)
            log.exception("push_link_lost", decode=request.decode_worker_id)
            self._send_failed(request.decode_worker_id, request.placement_id, failure)
        finally:
            prefill = self._prefills.pop(request.placement_id)
            self._worker.loop.engine.release(sequence)
            for each in prefill.images:
                each.close()
            self._worker.loop.wake()

    def _on_step(self, progress: list[StepProgress]) -> None:
        for each in progress:
            sequence_id = each.sequence.sequence_id
            prefill = self._prefills.get(sequence_id)
            if prefill is None:
                continue
            error = each.error or self._computed(prefill, each.sequence)
            if error is not None:
                prefill.push.cancel()
                self._send_failed(prefill.request.decode_worker_id, sequence_id, error)

    def _computed(self, prefill: Prefill, sequence: Sequence) -> Exception | None:
        """Returns what ends this prefill alone."""
        try:
            if prefill.first_step_at is None:
                prefill.first_step_at = self._worker.loop.reported_began_at
            prefill.computed_at = self._worker.clock.now()
            prefill.push.computed(sequence.num_computed_tokens)
        except BaseException as raised:
            error = item_error(raised)
            log.exception("progress_failed")
            return error
        return None

    def _on_control(self, message: AbortRequest | RenewLease) -> None:
        match message:
            case AbortRequest(placement_id=placement_id):
                if placement_id in self._prefills:
                    self._prefills[placement_id].push.cancel()
            case RenewLease():
                self._renew(message)

    def _renew(self, message: RenewLease) -> None:
        """Renews leases. Fails an unknown prefill, as decode missed its end and must not wait."""
        until = self._worker.clock.now() + message.lease_s
        for placement_id in message.placement_ids:
            prefill = self._prefills.get(placement_id)
            if prefill is not None:
                prefill.lease_until = until
            else:
                error = UnknownPlacement("this worker does not hold that prefill")
                self._send_failed(message.decode_worker_id, placement_id, error)

    def _send_failed(self, decode_worker_id: str, placement_id: bytes, error: Exception) -> None:
        message = PrefillFailed(
            placement_id=placement_id,
            prefill_worker_id=self._worker.worker_id,
            failure=failure_of(error),
        )
        self._worker.outbox.post(control("decode", decode_worker_id), message)

    def _send_phases(self, prefill: Prefill) -> None:
        request, now = prefill.request, self._worker.clock.now()
        first_step_at = prefill.first_step_at
        if first_step_at is None:  # every block was cached
            first_step_at = prefill.computed_at = prefill.accepted_at
        first_step_at = max(first_step_at, prefill.accepted_at)
        message = PrefillPhases(
            placement_id=request.placement_id,
            prefill_worker_id=self._worker.worker_id,
            queued_s=first_step_at - prefill.accepted_at,
            compute_s=max(0.0, prefill.computed_at - first_step_at),
            push_s=now - prefill.computed_at,
            num_pushed_bytes=prefill.push.num_bytes,
            link_s=prefill.push.link_s,
        )
        if (plan := prefill.push.plan) is not None:
            message = msgspec.structs.replace(
                message,
                port=plan.port,
                place=plan.place,
                num_copies=len(plan.copies),
                predicted_s=min(plan.seconds(message.num_pushed_bytes), MAX_DURATION_S),
            )
        self._worker.outbox.post(control("decode", request.decode_worker_id), message)

    def _counted(self, load: WorkerLoad) -> WorkerLoad:
        counts = self._port.counts
        return msgspec.structs.replace(
            load,
            num_pushed_tokens=round(counts.num_tokens),
            push_s=counts.busy_s,
            saved_kv_bytes=self._port.compressed.num_saved_bytes,
            kv_links=kv_links(self._port.plans),
        )

    async def _sweep(self) -> None:
        while True:
            await self._worker.clock.sleep(SWEEP_S)
            with failing_alone("prefills_not_expired"):
                self._expire(self._worker.clock.now())

    def _expire(self, now: float) -> None:
        for prefill in self._prefills.values():
            if now > min(prefill.lease_until, prefill.deadline_at):
                log.warning("lease_expired", decode=prefill.request.decode_worker_id)
                prefill.push.cancel()


def _sequence_of(request: RunPrefill, block_size: int) -> Sequence:
    """Returns the sequence of a command. Raises InvalidRequest if `first_token` is
    beyond the prompt.
    """
    token_ids = unpack_token_ids(request.token_ids)
    if request.first_token > len(token_ids):
        raise InvalidRequest(
            f"first_token {request.first_token} is beyond the prompt of {len(token_ids)} tokens",
            param="first_token",
        )
    return build_sequence(
        request,
        token_ids,
        sequence_id=request.placement_id,
        num_blocks=len(token_ids) // block_size,
        kv_quota_tokens=request.kv_quota_tokens,
    )
