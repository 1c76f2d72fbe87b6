"""Builds the timelines of each request when its response has left, and logs them.

    begin ──▶ ended (every output; the timelines can be read) ──▶ closed (the response has left)
      └──▶ refused (before it was admitted)

Only at `closed` is the client's stall known: a timeline that is read earlier is built on demand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Self

import structlog

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.telemetry.phases import (
    gateway_phases,
    num_late_masks,
    submitted_at,
    try_of,
)
from services.gateway.observability.telemetry.recent_requests import RecentRequests
from services.gateway.observability.telemetry.refusal_samples import RefusalSamples
from services.gateway.observability.telemetry.request_record import RequestRecord
from services.gateway.observability.telemetry.response_ids import ResponseIds
from services.gateway.observability.telemetry.timeline_ring import TimelineRing
from services.gateway.observability.telemetry.trace_context import caller_context
from services.gateway.observability.telemetry.trace_region import TraceRegion
from services.gateway.observability.telemetry.tracing import Tracing, open_tracing
from services.gateway.streams.fair_starts import FairStarts
from services.gateway.streams.receiver import StreamEnd
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import ReadTimeline, TimelineRead
from shared.randomness import Randomness
from shared.subjects import trace
from shared.telemetry.timeline import Timeline, Try
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TenantRecord
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

MAX_REFUSED = 256  # timelines
MAX_PER_TURN = 16  # timelines of responses' further prompts: about 0.1 ms each


class EndedOutput(Protocol):
    """The output of one prompt."""

    request_id: str
    num_prompt_tokens: int
    end: StreamEnd | None

    @property
    def num_cached_tokens(self) -> int | None: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    @property
    def outcome(self) -> str:
        """The finish reason or an error code."""
        ...


class RequestTelemetry:
    """Builds, logs and stores the timelines of requests. `wall_clock` returns Unix seconds."""

    def __init__(
        self,
        gateway_id: str,
        clock: Clock,
        wall_clock: Callable[[], float],
        tracing: Tracing | None = None,
        observe: Callable[[Timeline], None] = lambda timeline: None,
        region_of: Callable[[str], str] = lambda process_id: "",
        may_export: Callable[[TenantRecord], bool] = lambda tenant: True,
    ) -> None:
        """`observe` is called once with each timeline, when its response has left. `region_of`
        returns the region of a process, or "" if it is unknown; `may_export` whether the spans of
        a tenant may go to the collector.
        """
        self._may_export = may_export
        self._observe = observe
        self._region_of = region_of
        self._gateway_id = gateway_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._tracing = tracing
        self.ring = TimelineRing()
        # A separate ring: a tenant over its limits must not displace the timelines of others.
        self._refused = TimelineRing(MAX_REFUSED)
        self.recent = RecentRequests()
        self._response_ids = ResponseIds()
        self._samples = RefusalSamples()
        self._further = FairStarts(max_per_turn=MAX_PER_TURN)

    @classmethod
    def of(
        cls,
        gateway_id: str,
        clock: Clock,
        wall_clock: Callable[[], float],
        randomness: Randomness,
        metrics: GatewayMetrics,
        region_of: Callable[[str], str],
        trace_region: str,
        refusals: Refusals,
    ) -> Self:
        """Returns telemetry that traces requests if `OTEL_…` variables name a collector, which is
        in `trace_region`.
        """
        tracing = open_tracing(os.environ, gateway_id, randomness.bytes, clock)
        found = cls(
            gateway_id,
            clock,
            wall_clock,
            tracing,
            metrics.observe_timeline,
            region_of,
            may_export=TraceRegion(trace_region, refusals).may_export,
        )
        if tracing is not None:
            metrics.watch_dropped_spans(lambda: found.num_dropped_spans)
        return found

    @property
    def num_dropped_spans(self) -> int:
        return 0 if self._tracing is None else self._tracing.num_dropped

    async def serve(self, bus: Bus) -> None:
        """Answers the requests of other gateways for timelines."""
        await bus.serve(trace(bus.process_id), ReadTimeline, self._read_timeline)

    def _read_timeline(self, question: ReadTimeline) -> TimelineRead:
        return TimelineRead(timeline=self.find(question.request_id))

    async def open(self) -> None:
        if self._tracing is not None:
            await self._tracing.open()

    async def close(self) -> None:
        """Stops tracing, which takes seconds if the collector hangs."""
        self._further.start_all()
        if self._tracing is not None:
            await self._tracing.close()

    def begin(
        self, request_id: str, *, dialect: str = "", traceparent: str | None = None
    ) -> RequestRecord:
        """Returns the record of a new request. `traceparent` is the caller's header."""
        if self._tracing is None:
            trace = caller_context(traceparent)
        else:
            trace = self._tracing.begin(traceparent)
        return RequestRecord(request_id, self._clock.now(), dialect=dialect, trace=trace)

    def assign(self, record: RequestRecord, tenant: TenantRecord) -> None:
        """Records whose request it is."""
        record.tenant_id = tenant.tenant_id
        if self._tracing is not None and record.trace is not None and record.trace.is_sampled:
            record.is_exported = self._may_export(tenant)

    def find(self, request_id: str) -> Timeline | None:
        """Returns the timeline of a request, or None if it is unknown or removed. The id of its
        response is accepted, too.
        """
        found = self.ring.get(request_id) or self._refused.get(request_id)
        if found is not None:
            return found
        request_id = self.request_id_of(request_id)
        return self.ring.get(request_id) or self._refused.get(request_id)

    def request_id_of(self, name: str) -> str:
        """Returns the id of a request. `name` is that, or the id of its response."""
        return self._response_ids.request_id_of(name)

    def refused(self, record: RequestRecord, error: HearthError) -> None:
        """Records the rejection of a known tenant's request that was not admitted."""
        record.reject(error)
        self._finish(record, self._rejected(record, "", self._clock.now()), self._refused)

    def ended(self, record: RequestRecord, model: str, outputs: Sequence[EndedOutput]) -> None:
        record.ended_at = now = self._clock.now()
        if record.response_id:
            self._response_ids.add(record.response_id, record.request_id)
        if not outputs:
            self.ring.open(record.request_id, partial(self._rejected, record, model, now))
        for each in outputs:
            self.ring.open(each.request_id, partial(self._timeline, record, model, now, each))

    def closed(self, record: RequestRecord, model: str, outputs: Sequence[EndedOutput]) -> None:
        """Stores, logs and exports the timelines of a response that has left. Called
        after `ended`.
        """
        now = record.ended_at
        if now is None or record.stall_s:
            now = self._clock.now()
        first, *others = outputs or (None,)
        if first is None:
            self._finish(record, self._rejected(record, model, now), self.ring)
        else:
            self._finish(record, self._timeline(record, model, now, first), self.ring)
        for each in others:
            assert each is not None
            self._further.start(record.tenant_id, partial(self._closed, record, model, now, each))

    def _closed(self, record: RequestRecord, model: str, now: float, output: EndedOutput) -> None:
        with failing_alone("timeline_lost", request=output.request_id):
            self._add(self._timeline(record, model, now, output), self.ring)

    def _finish(self, record: RequestRecord, timeline: Timeline, ring: TimelineRing) -> None:
        """Adds the timeline of a response's first prompt and exports its trace: a response has one
        span.
        """
        self.recent.add(timeline)
        encoded, trace = self._add(timeline, ring), record.trace
        if self._tracing is None or trace is None or not trace.is_sampled:
            return
        if not record.is_exported:
            return
        attributes = record.attributes
        if record.is_streamed is not None:
            attributes["gen_ai.request.stream"] = record.is_streamed
        regions = {each: self._region_of(each) for each in _processes(timeline)}
        self._tracing.ended(timeline, encoded, trace, attributes, regions)

    def _add(self, timeline: Timeline, ring: TimelineRing) -> bytes:
        encoded = ring.add(timeline)
        self._log(timeline)
        self._observe(timeline)
        return encoded

    def _log(self, timeline: Timeline) -> None:
        if timeline.tries:
            _log(timeline)
            return
        # Rejected before any worker was involved: a client could cause such lines at no cost.
        now = self._clock.now()
        counts = self._samples.counts_to_log(timeline.tenant_id, timeline.outcome, now)
        if counts is not None:
            own = {"num_refusals": counts.num_refusals} if counts.num_refusals > 1 else {}
            others = {"num_other_refusals": counts.num_others} if counts.num_others else {}
            _log(timeline, **own, **others)

    def _timeline(
        self, record: RequestRecord, model: str, now: float, output: EndedOutput
    ) -> Timeline:
        end = output.end
        tries = () if end is None else end.tries
        began_at, built = submitted_at(record), list[Try]()
        for each in tries:
            built.append(
                try_of(
                    each,
                    began_at=began_at,
                    arrived_at=record.arrived_at,
                    gateway_id=self._gateway_id,
                    is_last=each is tries[-1],
                )
            )
            began_at = each.ended_at
        firsts = [each.first_token_at for each in tries if each.first_token_at is not None]
        error = None if end is None else end.error
        return Timeline(
            request_id=output.request_id,
            tenant_id=record.tenant_id,
            gateway_id=self._gateway_id,
            model=model,
            dialect=record.dialect,
            status=_status(error),
            outcome=output.outcome,
            started_at=self._wall_clock() - (now - record.arrived_at),
            duration_s=now - record.arrived_at,
            ttft_s=firsts[0] - record.arrived_at if firsts else None,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens or 0,
            num_output_tokens=output.num_output_tokens,
            num_reasoning_tokens=output.num_reasoning_tokens,
            num_late_masks=num_late_masks(tries),
            gateway_phases=gateway_phases(record, self._gateway_id, submitted_at(record)),
            tries=tuple(built),
        )

    def _rejected(self, record: RequestRecord, model: str, now: float) -> Timeline:
        return Timeline(
            request_id=record.request_id,
            tenant_id=record.tenant_id,
            gateway_id=self._gateway_id,
            model=model,
            dialect=record.dialect,
            status=record.status,
            outcome=record.outcome,
            started_at=self._wall_clock() - (now - record.arrived_at),
            duration_s=now - record.arrived_at,
            gateway_phases=gateway_phases(record, self._gateway_id, now),
        )


def _status(error: HearthError | None) -> int:
    return 200 if error is None else error.http_status


def _processes(timeline: Timeline) -> set[str]:
    workers = (each for one in timeline.tries for each in (one.worker_id, one.prefill_worker_id))
    schedulers = (each.scheduler_id for each in timeline.tries)
    return {timeline.gateway_id, *workers, *schedulers} - {""}


def _log(timeline: Timeline, **more: object) -> None:
    last = timeline.tries[-1] if timeline.tries else None
    phases: dict[str, float] = {}
    for each in (timeline.gateway_phases, *(each.phases for each in timeline.tries)):
        for phase in each:
            phases[phase.name] = phases.get(phase.name, 0.0) + phase.duration_s
    log.info(
        "request_ended",
        request_id=timeline.request_id,
        tenant=timeline.tenant_id,
        model=timeline.model,
        dialect=timeline.dialect,
        status=timeline.status,
        outcome=timeline.outcome,
        phases={name: round(spent_s, 6) for name, spent_s in phases.items()},
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        num_output_tokens=timeline.num_output_tokens,
        worker="" if last is None else last.worker_id,
        prefill_worker="" if last is None else last.prefill_worker_id,
        num_resubmissions=timeline.num_resubmissions,
        **more,
    )
