"""Builds the timeline of each request when its outputs have ended, and logs it at the very end.

    begin ──▶ ended (every output; the timelines can be read) ──▶ closed (the response has left)

A client's stall is known at `closed` alone; the timelines are then built again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.gateway.streams.stream import StreamEnd
from services.gateway.telemetry.phases import (
    gateway_phases,
    num_late_masks,
    submitted_at,
    try_of,
)
from services.gateway.telemetry.request_record import RequestRecord
from services.gateway.telemetry.timeline_ring import TimelineRing
from services.gateway.telemetry.trace_context import caller_context
from services.gateway.telemetry.tracing import Tracing
from shared.clock import Clock
from shared.errors import HearthError
from shared.telemetry.timeline import Timeline, Try

log = structlog.get_logger(__name__)


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
    def outcome(self) -> str:
        """A finish reason, or an error code."""
        ...


class RequestTelemetry:
    """`wall_clock`: seconds since 1970."""

    def __init__(
        self,
        gateway_id: str,
        clock: Clock,
        wall_clock: Callable[[], float],
        tracing: Tracing | None = None,
        observe: Callable[[Timeline], None] = lambda timeline: None,
    ) -> None:
        """`observe`: gets each timeline once, when its response has left."""
        self._observe = observe
        self._gateway_id = gateway_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._tracing = tracing
        self.ring = TimelineRing()

    @property
    def num_dropped_spans(self) -> int:
        return 0 if self._tracing is None else self._tracing.num_dropped

    def begin(
        self, request_id: str, *, dialect: str = "", traceparent: str | None = None
    ) -> RequestRecord:
        """`traceparent`: the caller's header."""
        if self._tracing is None:
            trace = caller_context(traceparent)
        else:
            trace = self._tracing.start(traceparent)
        return RequestRecord(request_id, self._clock.now(), dialect=dialect, trace=trace)

    async def close(self) -> None:
        """Takes seconds if the collector hangs."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def ended(self, record: RequestRecord, model: str, outputs: Sequence[EndedOutput]) -> None:
        now = self._clock.now()
        if outputs:
            timelines = [self._timeline(record, model, now, each) for each in outputs]
        else:
            timelines = [self._rejected(record, model, now)]
        record.timelines = timelines
        for timeline in timelines:
            self.ring.add(timeline)

    def closed(self, record: RequestRecord, model: str, outputs: Sequence[EndedOutput]) -> None:
        if record.stall_s:
            self.ended(record, model, outputs)
        for timeline in record.timelines:
            _log(timeline)
            self._observe(timeline)
        if self._tracing is not None and record.trace is not None:
            # one span a response: that of its first prompt
            self._tracing.ended(record.timelines[0], record.trace, record.attributes)

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
            status=_status(record.error),
            outcome="none" if record.error is None else record.error.code,
            started_at=self._wall_clock() - (now - record.arrived_at),
            duration_s=now - record.arrived_at,
            gateway_phases=gateway_phases(record, self._gateway_id, now),
        )


def _status(error: HearthError | None) -> int:
    return 200 if error is None else error.http_status


def _log(timeline: Timeline) -> None:
    last = timeline.tries[-1] if timeline.tries else None
    phases: dict[str, float] = {}
    for each in (timeline.gateway_phases, *(each.phases for each in timeline.tries)):
        for phase in each:
            phases[phase.name] = round(phases.get(phase.name, 0.0) + phase.duration_s, 6)
    log.info(
        "request_ended",
        request_id=timeline.request_id,
        tenant=timeline.tenant_id,
        model=timeline.model,
        dialect=timeline.dialect,
        status=timeline.status,
        outcome=timeline.outcome,
        phases=phases,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        num_output_tokens=timeline.num_output_tokens,
        worker="" if last is None else last.worker_id,
        prefill_worker="" if last is None else last.prefill_worker_id,
        num_resubmissions=timeline.num_resubmissions,
    )
