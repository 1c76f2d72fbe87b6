"""Spans of an ended request, from its timeline. The only file that imports OpenTelemetry, besides
`span_exporter.py`; neither is imported if tracing is off.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.gateway.telemetry.trace_context import TraceContext
from shared.telemetry.timeline import Phase, Timeline, Try

Attributes = Mapping[str, str | int | float | bool]
_OF_SCHEDULERS = ("queue", "placement")
MAX_RESOURCES = 1024


def num_spans(timeline: Timeline) -> int:
    phases = sum(len(each.phases) for each in timeline.tries)
    return 1 + len(timeline.gateway_phases) + len(timeline.tries) + phases


class SpanBuilder:
    def __init__(self, timeline: Timeline, context: TraceContext, attributes: Attributes) -> None:
        self._timeline = timeline
        self._context = context
        self._attributes = attributes
        self._root = self._span_context(context.span_id)

    def build(self) -> list[ReadableSpan]:
        timeline, gateway = self._timeline, resource("gateway", self._timeline.gateway_id)
        spans = [self._server_span(gateway)]
        spans += [self._phase(each, self._root, None) for each in timeline.gateway_phases]
        first: SpanContext | None = None
        for each in timeline.tries:
            own = self._span_context(secrets.token_bytes(8))
            spans.append(self._try(each, own, first, gateway))
            spans += [self._phase(phase, own, each) for phase in each.phases]
            first = first or own
        return spans

    def _server_span(self, gateway: Resource) -> ReadableSpan:
        timeline, context = self._timeline, self._context
        parent = self._span_context(context.parent_id) if context.parent_id else None
        has_failed = timeline.status >= 400
        attributes: dict[str, str | int | float | bool | Sequence[str]] = {
            "gen_ai.provider.name": "hearth",
            "gen_ai.request.model": timeline.model,
            "gen_ai.response.model": timeline.model,
            "gen_ai.response.id": timeline.request_id,
            "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
            "http.response.status_code": timeline.status,
            **self._attributes,
        }
        if timeline.ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = timeline.ttft_s
        if has_failed:
            attributes["error.type"] = timeline.outcome
        else:
            attributes["gen_ai.response.finish_reasons"] = (timeline.outcome,)
        operation = self._attributes.get("gen_ai.operation.name", "chat")
        return ReadableSpan(
            f"{operation} {timeline.model}".strip(),
            context=self._root,
            parent=parent,
            resource=gateway,
            attributes=attributes,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if has_failed else StatusCode.UNSET),
            start_time=self._time(0.0),
            end_time=self._time(timeline.duration_s),
        )

    def _try(
        self, each: Try, own: SpanContext, first: SpanContext | None, gateway: Resource
    ) -> ReadableSpan:
        """A later try is linked to the first."""
        start_s = each.phases[0].start_s if each.phases else 0.0
        last = each.phases[-1] if each.phases else None
        return ReadableSpan(
            f"try {each.number}",
            context=own,
            parent=self._root,
            resource=gateway,
            attributes={**_placement(each), "hearth.outcome": each.outcome},
            links=() if first is None else (Link(first),),
            start_time=self._time(start_s),
            end_time=self._time(start_s if last is None else last.start_s + last.duration_s),
        )

    def _phase(self, phase: Phase, parent: SpanContext, each: Try | None) -> ReadableSpan:
        attributes: dict[str, str | int] = {} if each is None else _placement(each)
        counts = {
            "hearth.num_bytes": phase.num_bytes,
            "hearth.num_tokens": phase.num_tokens,
            "hearth.num_steps": phase.num_steps,
        }
        attributes |= {name: count for name, count in counts.items() if count}
        return ReadableSpan(
            phase.name,
            context=self._span_context(secrets.token_bytes(8)),
            parent=parent,
            resource=resource(self._role(phase, each), phase.process_id),
            attributes=attributes,
            start_time=self._time(phase.start_s),
            end_time=self._time(phase.start_s + phase.duration_s),
        )

    def _role(self, phase: Phase, each: Try | None) -> str:
        if each is None or phase.process_id == self._timeline.gateway_id:
            return "gateway"
        if phase.name in _OF_SCHEDULERS:
            return "scheduler"
        return "prefill" if phase.process_id == each.prefill_worker_id else "decode"

    def _span_context(self, span_id: bytes) -> SpanContext:
        return SpanContext(
            int.from_bytes(self._context.trace_id, "big"),
            int.from_bytes(span_id, "big"),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )

    def _time(self, offset_s: float) -> int:
        return int((self._timeline.started_at + offset_s) * 1e9)


def _placement(each: Try) -> dict[str, str | int]:
    return {"hearth.worker.id": each.worker_id, "hearth.placement.id": each.placement_id}


@lru_cache(MAX_RESOURCES)
def resource(role: str, process_id: str) -> Resource:
    """Exporters group spans by it: no other process needs an SDK."""
    names = {"service.name": f"hearth-{role}", "service.instance.id": process_id}
    return Resource({**names, "telemetry.sdk.language": "python"})
