"""Runs this worker's handoffs: requests prefills, renews their leases, aborts failed attempts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from services.decode.handoff import Handoff
from services.decode.running_request import RunningRequest
from shared.background import Background, item_error
from shared.engine.kv.ports import ReceivePort
from shared.engine.worker import EngineWorker
from shared.errors import WorkerBusy
from shared.messages import (
    AbortRequest,
    PrefillAccepted,
    PrefillPhases,
    RenewLease,
    RunPrefill,
    WorkerLoad,
)
from shared.packing import pack_hashes, pack_token_ids
from shared.subjects import control, run_prefill

log = structlog.get_logger(__name__)

PREFILL_ACK_S = 0.25  # plus the round trip
PREFILL_LEASE_S = 3.0


class ActiveHandoffs:
    def __init__(
        self,
        worker: EngineWorker,
        port: ReceivePort,
        on_ended: Callable[[RunningRequest, Handoff, int], None],
        on_failed: Callable[[RunningRequest], None],
    ) -> None:
        """Each handoff ends with a call of `on_ended(placement, handoff, num_held_tokens)`; if that
        raises, of `on_failed(placement)`.
        """
        self._worker = worker
        self._port = port
        self._on_ended = on_ended
        self._on_failed = on_failed
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
        )

    def start(self, placement: RunningRequest, candidates: tuple[str, ...]) -> None:
        handoff = placement.handoff = self._handoff(placement, candidates)
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
                decode_worker_id=self._worker.worker_id,
                placement_ids=tuple(placement_ids),
                lease_s=PREFILL_LEASE_S,
            )
            self._worker.outbox.post(control("prefill", worker_id), message)

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
            self._num_failed += handoff.num_failed_tries
        placement.handoff = None
        self._on_ended(placement, handoff, num_held)

    async def _request_prefill(
        self, placement: RunningRequest, worker_id: str, placement_id: bytes, first_token: int
    ) -> PrefillAccepted:
        """Requests a prefill. Raises HearthError if the prefill worker rejects the command or
        does not reply.
        """
        if self._worker.health_monitor.fleet.is_lost(worker_id):
            raise WorkerBusy(f"{worker_id} is not alive")
        worker, request, prompt = self._worker, placement.request, placement.prompt
        command = RunPrefill(
            placement_id=placement_id,
            tenant_id=request.tenant_id,
            decode_worker_id=worker.worker_id,
            model=request.model,
            revision=request.revision,
            kv_format=worker.served.card.kv_format,
            cache_root=request.cache_root,
            token_ids=pack_token_ids(prompt.token_ids[: prompt.num_prefill_tokens]),
            block_hashes=pack_hashes(prompt.block_hashes),
            num_public_blocks=prompt.num_public_blocks,
            first_token=first_token,
            kv_quota_tokens=request.kv_quota_tokens,
            targets=self._port.targets,
            lease_s=PREFILL_LEASE_S,
            deadline_s=max(0.0, placement.deadline_at - worker.clock.now()),
            link_key=self._port.link_key(worker_id),
            public_root=request.public_root,
            numerics=worker.served.card.numerics,
            request_id=request.request_id,
            needs=request.needs,
            traceparent=request.traceparent,
        )
        self.forget(placement)
        placement.prefill_id = placement_id
        self._awaiting_phases[placement_id] = placement
        requested_at = worker.clock.now()
        accepted = await worker.health_monitor.requests.request(
            worker_id, run_prefill(worker_id), command, PrefillAccepted, base_s=PREFILL_ACK_S
        )
        self._num_accepted += 1
        placement.times.accepted_at = worker.clock.now()
        self._ack_s += placement.times.accepted_at - requested_at
        return accepted

    def _abandon(self, worker_id: str, placement_id: bytes) -> None:
        message = AbortRequest(placement_id=placement_id, reason="superseded")
        self._worker.outbox.post(control("prefill", worker_id), message)
