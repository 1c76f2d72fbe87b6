"""The decode handlers: reserve blocks, receive the prompt's KV, sample tokens, send them.

Several choices of one request are several sequences: the engine computes the shared prompt first,
then forks it. A placement lives under its gateway's lease (the gateway's heartbeat). Finished
output stays in the output buffer until the gateway has acknowledged it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import structlog

from services.decode.active_handoffs import ActiveHandoffs
from services.decode.choice_grammars import ChoiceGrammars
from services.decode.handoff import Handoff
from services.decode.phase_times import PhaseTimes
from services.decode.running_request import RunningRequest, placement_id_of, sequences_of
from services.decode.token_flusher import TokenFlusher
from shared.background import Background, failing_alone, item_error
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.engine.kv.ports import ReceivePort
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.engine.worker import EngineWorker
from shared.errors import InvalidRequest, WorkerBusy
from shared.lifecycle.health import Loss
from shared.messages import (
    AbortRequest,
    AckFinished,
    DecodeStarted,
    Finish,
    FinishReason,
    PrefillFailed,
    PrefillPhases,
    Request,
    ResendTokens,
    StartDecode,
    TokenBatch,
)
from shared.output.output_buffer import Output, OutputBuffer
from shared.subjects import control, from_sites, resend, start_decode
from shared.transport.bus import failure_of

log = structlog.get_logger(__name__)

SWEEP_S = 0.25
ORPHAN_S = 3.0  # time from the loss of a gateway to the abort of its placements
RESEND_S = 2.0  # interval of resending a placement without new tokens, or its finish
UNACKNOWLEDGED_S = 30.0
MAX_WAITING = 64
MAX_FENCED = 10_000


@dataclass(slots=True)
class Ended:
    """A placement whose gateway has not acknowledged its finish. Times by the worker's clock."""

    gateway_id: str
    at: float
    flushed_at: float


class DecodeService:
    def __init__(
        self,
        worker: EngineWorker,
        port: ReceivePort,
        grammars: WorkerGrammars | None = None,
        *,
        site: str = "",
    ) -> None:
        """Serves placements. `grammars` is None on a worker that does not announce the feature.
        `site` is the name of this site for those that compute prompts for it; empty: none does.
        """
        self._worker = worker
        self._site = site
        self._grammars = ChoiceGrammars(worker, grammars)
        self._engine = worker.loop.engine
        self._output_buffer = OutputBuffer()
        self._token_flusher = TokenFlusher(worker, self._output_buffer)
        self._placements: dict[bytes, RunningRequest] = {}
        self._unfinished: dict[Sequence, tuple[RunningRequest, Output]] = {}  # unfinished choices
        self._ended: dict[bytes, Ended] = {}
        self._fenced: OrderedDict[bytes, None] = OrderedDict()  # aborted, maybe before StartDecode
        self._orphaned_since: dict[str, float] = {}
        self._active_handoffs = ActiveHandoffs(
            worker, port, self._on_handoff_ended, self._on_handoff_failed, site=site
        )
        self._background = Background()

    async def start(self) -> None:
        worker, bus = self._worker, self._worker.bus
        worker.count(self._active_handoffs.counted)
        self._grammars.start()
        worker.loop.listen(self._on_step)
        worker.health_monitor.on_lost(self._on_peer_lost)
        await bus.subscribe(
            control("decode", worker.worker_id),
            AbortRequest | AckFinished | PrefillFailed | PrefillPhases,
            self._on_control,
        )
        if self._site:
            await bus.subscribe(
                from_sites("decode", worker.worker_id, "control"),
                PrefillFailed | PrefillPhases,
                self._on_control,
            )
        await bus.serve(resend(worker.worker_id), ResendTokens, self._resend)
        await bus.serve(start_decode(worker.worker_id), StartDecode, self._start_decode)
        self._background.start_own(self._token_flusher.run())
        self._background.start_own(self._sweep())

    @property
    def num_unfinished(self) -> int:
        """Placements that run, or whose gateway has not acknowledged the finish."""
        return max(len(self._placements), len(self._output_buffer))

    @property
    def num_pushes(self) -> int:
        return 0

    def hand_over(self) -> None:
        """Ends all placements here. Each gateway continues its own at the same token, elsewhere."""
        error = WorkerBusy(f"{self._worker.worker_id} is drained")
        for placement in list(self._placements.values()):
            with failing_alone("not_handed_over", placement_id=placement.placement_id.hex()):
                self._return(placement, error)
        self._token_flusher.flush()
        self._worker.loop.wake()

    def _return(self, placement: RunningRequest, error: WorkerBusy) -> None:
        """Fails every choice with a retryable error, and frees the placement's blocks."""
        now, in_engine, handoff = self._worker.clock.now(), placement.in_engine, placement.handoff
        for sequence in list(placement.choices.values()):
            failed = StepProgress(sequence, finish_reason="failed", error=error)
            self._emit(*self._unfinished[sequence], failed, now)
        if handoff is not None:
            handoff.cancel()
            return
        for sequence in in_engine:
            self._engine.abort(sequence)

    async def drain(self) -> None:
        """Returns once every placement has ended and its gateway has acknowledged the finish."""
        while self.num_unfinished:
            await self._worker.clock.sleep(SWEEP_S)

    async def stop(self) -> None:
        await self._background.stop()
        for placement_id in list(self._placements):
            self._abort(placement_id)
        await self._active_handoffs.stop()
        self._grammars.stop()

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def _start_decode(self, command: StartDecode) -> DecodeStarted:
        placement_id = command.placement_id
        request = self._worker.tenant_kv.unretained.current(command.request)
        known = self._placements.get(placement_id)
        if known is not None:
            return self._started(known)
        self._check_admission(placement_id)
        regions = self._worker.refusals.require("decode", request)
        self._check_model(request)
        prompt, choices = sequences_of(
            placement_id,
            request,
            card=self._worker.served.card,
            eos_token_ids=self._worker.served.eos_token_ids,
            check_fits=self._engine.check_fits,
        )
        self._worker.check_tokens(*choices.values())
        self._worker.check_hashes(request, request.prompt_token_ids)
        sequences = dict.fromkeys((prompt, *choices.values()))  # the prompt may be a choice
        announced_class = self._worker.announced.class_of(request)
        for sequence in sequences:
            sequence.region_class = announced_class
        images = self._worker.attach_images(request, request.prompt_token_ids, sequences)
        for sequence in choices.values():
            self._engine.accept(sequence)
        self._grammars.attach(request, choices)
        now = self._worker.clock.now()
        placement = RunningRequest(
            placement_id=placement_id,
            request=request,
            prompt=prompt,
            choices=choices,
            numerics=self._worker.served.card.numerics,
            deadline_at=now + request.deadline_s,
            flushed_at=now,
            times=PhaseTimes(started_at=now),
            images=images,
            regions=regions,
            site_regions=dict(command.candidate_regions),
        )
        self._placements[placement_id] = placement
        try:
            self._admit(placement, command.prefill_candidates)
            self._open_outputs(placement)
        except BaseException as raised:
            item_error(raised)
            self._abort(placement_id)
            raise
        self._worker.loop.wake()
        return self._started(placement)

    def _check_model(self, request: Request) -> None:
        """Raises the HearthError that rejects a request which this worker's model cannot serve."""
        self._worker.check_model(request.model, request.revision)
        self._worker.check_block_size(request.block_size)
        self._worker.check_needs(request.needs)
        if request.pooling is None and not self._worker.served.has_head:
            raise InvalidRequest(
                f"model {request.model!r} has no output head (lm_head.weight): "
                "it gives embeddings only",
                param="model",
            )

    def _open_outputs(self, placement: RunningRequest) -> None:
        placement_id, gateway_id = placement.placement_id, _owner(placement)
        for index, sequence in placement.choices.items():
            first_position = sequence.num_output_tokens
            output = self._output_buffer.open(
                placement_id, gateway_id, index, first_position, placement.request.region_class
            )
            self._unfinished[sequence] = placement, output

    def _check_admission(self, placement_id: bytes) -> None:
        worker_id = self._worker.worker_id
        self._worker.check_accepting("decode")
        if placement_id in self._fenced or placement_id in self._ended:
            raise WorkerBusy("this placement was already aborted")
        num_waiting = len(self._engine.batcher.waiting)
        if num_waiting >= MAX_WAITING:
            raise WorkerBusy(f"{worker_id} has {num_waiting} requests waiting", retry_after_s=1.0)

    def _admit(self, placement: RunningRequest, candidates: tuple[str, ...]) -> None:
        prompt, first = placement.prompt, placement.in_engine
        is_local = prompt.num_prefill_tokens == 0 or prompt.pooling is not None
        if not candidates or len(first) > 1 or is_local:
            for sequence in first:
                self._engine.add(sequence)
            return
        if not self._engine.reserve(prompt):
            raise WorkerBusy(f"{self._worker.worker_id} has no room for this prompt's KV now")
        if prompt.num_computed_tokens == prompt.num_prefill_tokens:  # a full cache hit
            self._activate(placement, prompt.num_computed_tokens)
            return
        self._active_handoffs.start(placement, candidates)

    def _on_handoff_ended(self, placement: RunningRequest, handoff: Handoff, num_held: int) -> None:
        """Activates the choices in the engine, or aborts an aborted placement's prompt."""
        if handoff.is_cancelled:
            self._engine.abort(placement.prompt)
        else:
            self._activate(placement, num_held)
        self._worker.loop.wake()

    def _on_handoff_failed(self, placement: RunningRequest) -> None:
        """Aborts the placement. The gateway misses its tokens, and tries another worker."""
        self._abort(placement.placement_id)

    def _activate(self, placement: RunningRequest, num_held_tokens: int) -> None:
        self._engine.activate(placement.prompt, num_held_tokens)
        self._fork(placement)

    def _fork(self, placement: RunningRequest) -> None:
        """Forks the shared prompt into its choices once the prompt is computed."""
        if placement.prompt.state is SequenceState.HELD:
            self._engine.fork(placement.prompt, list(placement.choices.values()))

    def _started(self, placement: RunningRequest) -> DecodeStarted:
        return DecodeStarted(
            placement_id=placement.placement_id,
            num_cached_tokens=placement.prompt.num_cached_tokens,
        )

    def _resend(self, command: ResendTokens) -> TokenBatch:
        placement = self._placements.get(command.placement_id)
        entry = self._output_buffer.resend(
            command.placement_id,
            command.choice_index,
            command.from_position,
            region_class=command.region_class,
            is_waiting=placement is not None and placement.is_waiting,
        )
        return TokenBatch(
            worker_id=self._worker.worker_id, entries=(entry,), region_class=command.region_class
        )

    def _on_control(
        self, message: AbortRequest | AckFinished | PrefillFailed | PrefillPhases
    ) -> None:
        match message:
            case AbortRequest(placement_id=placement_id, choice_index=None):
                self._fence(placement_id)
                self._abort(placement_id)
            case AbortRequest(placement_id=placement_id, choice_index=int(choice_index)):
                self._abort_choice(placement_id, choice_index)
            case AckFinished(placement_ids=placement_ids):
                for placement_id in placement_ids:
                    # not ended here if a second process with this id has finished it
                    self._abort(placement_id)
            case PrefillFailed(placement_id=placement_id, failure=failure):
                self._active_handoffs.fail_try(placement_id, failure.message)
            case PrefillPhases():
                self._active_handoffs.take_phases(message)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _on_step(self, progress: list[StepProgress]) -> None:
        self._grammars.step_ended()
        now, began_at = self._worker.clock.now(), self._worker.loop.reported_began_at
        for each in progress:
            try:
                self._on_progress(each, now, began_at)
            except BaseException as raised:  # the others of the step continue
                item_error(raised)
                log.exception("progress_failed")
                self._abort(placement_id_of(each.sequence))
        self._token_flusher.step_ended(is_idle=not self._unfinished)

    def _on_progress(self, progress: StepProgress, now: float, began_at: float) -> None:
        choice = self._unfinished.get(progress.sequence)
        if choice is None:
            self._on_prompt(progress, now)
            return
        choice[0].times.record_step(began_at)
        if progress.token_ids or progress.finish_reason:
            self._emit(*choice, progress, now)

    def _on_prompt(self, progress: StepProgress, now: float) -> None:
        """Forks a computed shared prompt, or fails its choices. Ignores sequences that this service
        does not, or no longer, own.
        """
        placement = self._placements.get(placement_id_of(progress.sequence))
        if placement is None or not progress.sequence.is_prefill_only:
            return
        placement.times.record_step(self._worker.loop.reported_began_at)
        if progress.finish_reason is None:
            self._fork(placement)
            return
        self._engine.release(placement.prompt)
        for sequence in list(placement.choices.values()):
            failed = msgspec.structs.replace(progress, sequence=sequence)
            self._emit(*self._unfinished[sequence], failed, now)

    def _emit(
        self, placement: RunningRequest, output: Output, progress: StepProgress, now: float
    ) -> None:
        placement.flushed_at = now
        placement.times.record_tokens(now)
        if output.served is None:
            output.served = placement.served(progress.sequence)
        finish = None
        if progress.finish_reason is not None:
            finish = _finish_of(placement, progress, progress.finish_reason)
            self._grammars.choice_ended(progress.error)
            self._end_choice(placement, progress.sequence)
        self._output_buffer.add(
            output,
            progress.token_ids,
            finish,
            logprobs=progress.logprobs,
            prompt_logprobs=progress.prompt_logprobs,
        )

    def _end_choice(self, placement: RunningRequest, sequence: Sequence) -> None:
        """Ends the placement when its last choice ends."""
        del placement.choices[sequence.choice_index]
        del self._unfinished[sequence]
        if placement.choices:
            return
        del self._placements[placement.placement_id]
        placement.close_images()
        self._active_handoffs.forget(placement)
        self._grammars.request_ended(placement.request)
        now = self._worker.clock.now()
        self._ended[placement.placement_id] = Ended(_owner(placement), now, flushed_at=now)

    # ── endings ──────────────────────────────────────────────────────────────────────────────────

    def _on_peer_lost(self, process_id: str, loss: Loss) -> None:
        self._active_handoffs.fail_worker(process_id, f"{process_id} is {loss.value}")
        if loss in (Loss.RESTARTED, Loss.STOPPED):  # the gateway's requests are lost
            self._drop_gateway(process_id)

    def _drop_gateway(self, gateway_id: str) -> None:
        owned = [p.placement_id for p in self._placements.values() if _owner(p) == gateway_id]
        owned += [p for p, ended in self._ended.items() if ended.gateway_id == gateway_id]
        for placement_id in owned:
            self._abort(placement_id)

    def _abort(self, placement_id: bytes) -> None:
        """Aborts a placement. Frees blocks once no frame is copied into them and no step reads
        them. Idempotent.
        """
        self._output_buffer.drop(placement_id)
        self._ended.pop(placement_id, None)
        placement = self._placements.pop(placement_id, None)
        if placement is None:
            return
        placement.close_images()
        self._active_handoffs.forget(placement)
        self._grammars.request_ended(placement.request)
        for sequence in placement.choices.values():
            self._unfinished.pop(sequence, None)
        if placement.handoff is not None:
            placement.handoff.cancel()
        else:
            for sequence in placement.in_engine:
                self._engine.abort(sequence)
        self._worker.loop.wake()

    def _abort_choice(self, placement_id: bytes, choice_index: int) -> None:
        """Aborts one choice. The others continue or, if finished, wait for
        acknowledgement. Idempotent.
        """
        self._output_buffer.drop_choice(placement_id, choice_index)
        if placement_id not in self._output_buffer:  # no other choice is left
            self._fence(placement_id)
            self._abort(placement_id)
            return
        placement = self._placements.get(placement_id)
        sequence = None if placement is None else placement.choices.get(choice_index)
        if placement is None or sequence is None:
            return
        if placement.is_forked:
            self._engine.abort(sequence)
        self._end_choice(placement, sequence)
        self._worker.loop.wake()

    def _fence(self, placement_id: bytes) -> None:
        self._fenced[placement_id] = None
        if len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)

    async def _sweep(self) -> None:
        while True:
            await self._worker.clock.sleep(SWEEP_S)
            now = self._worker.clock.now()
            self._active_handoffs.renew_leases()
            for placement_id in self._overdue(now):
                with failing_alone("overdue_not_aborted", placement_id=placement_id.hex()):
                    self._fence(placement_id)
                    self._abort(placement_id)
            with failing_alone("tokens_not_resent"):
                self._resend_overdue(now)

    def _resend_overdue(self, now: float) -> None:
        """Resends placements without an update for RESEND_S; a gateway acknowledges a finish, or
        aborts a placement that it has given up. The first message may have been lost, and a
        gateway may not know a placement that has no tokens yet.
        """
        for held in (self._placements, self._ended):
            for placement_id, each in held.items():
                if now - each.flushed_at >= RESEND_S:
                    each.flushed_at = now
                    is_waiting = isinstance(each, RunningRequest) and each.is_waiting
                    self._output_buffer.resend_overdue(placement_id, is_waiting=is_waiting)
        self._token_flusher.flush()

    def _overdue(self, now: float) -> list[bytes]:
        """Placements past their deadline, without a live gateway, or ended but unacknowledged."""
        fleet = self._worker.health_monitor.fleet
        gateways = {_owner(placement) for placement in self._placements.values()}
        gateways |= {ended.gateway_id for ended in self._ended.values()}
        if fleet.can_judge(now):
            for gateway_id in gateways:
                if fleet.is_live(gateway_id):
                    self._orphaned_since.pop(gateway_id, None)
                else:
                    self._orphaned_since.setdefault(gateway_id, now)
        orphaned = {g for g, since in self._orphaned_since.items() if now - since > ORPHAN_S}
        overdue = [
            placement_id
            for placement_id, placement in self._placements.items()
            if now > placement.deadline_at or _owner(placement) in orphaned
        ]
        overdue += [
            placement_id
            for placement_id, ended in self._ended.items()
            if now - ended.at > UNACKNOWLEDGED_S or ended.gateway_id in orphaned
        ]
        self._orphaned_since = {g: s for g, s in self._orphaned_since.items() if g in gateways}
        return overdue


def _finish_of(placement: RunningRequest, progress: StepProgress, reason: FinishReason) -> Finish:
    embedding = progress.embedding
    return Finish(
        reason=reason,
        served=placement.served(progress.sequence),
        stop_token_id=progress.stop_token_id,
        failure=None if progress.error is None else failure_of(progress.error),
        embedding=None if embedding is None else embedding.astype("<f4").tobytes(),
    )


def _owner(placement: RunningRequest) -> str:
    return placement.request.gateway_id
