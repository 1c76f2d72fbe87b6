"""Spans of ended requests, from their timelines, as OTLP. No I/O.

Built as messages of `opentelemetry-proto`: the SDK's spans take eight times the CPU. Only the span
process imports this file.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from opentelemetry.sdk.resources import Resource as SdkResource

from services.gateway.telemetry.traced_request import TracedRequest, shown
from shared.telemetry.timeline import Phase, Timeline, Try

MAX_CACHED = 4096
_OF_SCHEDULERS = ("queue", "placement")
_SAMPLED = 1  # the W3C's flag
_decode = msgspec.msgpack.Decoder(Timeline).decode


class SpanBatch:
    """The spans of some requests, by the processes that did the work."""

    def __init__(self) -> None:
        self.request = ExportTraceServiceRequest()
        self.num_spans = 0
        self._by_process: dict[tuple[str, str], ScopeSpans] = {}

    def add(self, traced: TracedRequest) -> None:
        for role, process_id, span in _SpanBuilder(traced).build():
            self._scope(role, process_id).spans.append(span)
            self.num_spans += 1

    def _scope(self, role: str, process_id: str) -> ScopeSpans:
        found = self._by_process.get((role, process_id))
        if found is None:
            added = self.request.resource_spans.add(resource=resource(role, process_id))
            found = self._by_process[role, process_id] = added.scope_spans.add()
        return found


class _SpanBuilder:
    def __init__(self, traced: TracedRequest) -> None:
        self._traced = traced
        self._timeline = _decode(traced.timeline)
        self._started_ns = int(self._timeline.started_at * 1e9)

    def build(self) -> Iterator[tuple[str, str, Span]]:
        """Yields the role and the id of the process that did the work, and the span."""
        timeline, gateway_id = self._timeline, self._timeline.gateway_id
        yield "gateway", gateway_id, self._server_span()
        for phase in shown(timeline.gateway_phases):
            region = self._region(gateway_id)
            yield "gateway", gateway_id, self._phase(phase, self._traced.span_id, region)
        first = b""
        for each in timeline.tries:
            own = secrets.token_bytes(8)
            yield "gateway", gateway_id, self._try(each, own, first)
            placement = _placement(each)
            for phase in shown(each.phases):
                attributes = [*placement, *self._region(phase.process_id)]
                span = self._phase(phase, own, attributes)
                yield self._role(phase, each), phase.process_id, span
            first = first or own

    def _server_span(self) -> Span:
        timeline, traced = self._timeline, self._traced
        has_failed = timeline.status >= 400
        own = {**_attributes(timeline), **traced.attributes}
        operation = traced.attributes.get("gen_ai.operation.name", "chat")
        return self._span(
            f"{operation} {timeline.model}".strip(),
            traced.span_id,
            traced.parent_id,
            (0.0, timeline.duration_s),
            [*pairs(own), *self._region(timeline.gateway_id)],
            kind=Span.SpanKind.SPAN_KIND_SERVER,
            status=Status(code=Status.STATUS_CODE_ERROR) if has_failed else None,
        )

    def _try(self, each: Try, own: bytes, first: bytes) -> Span:
        """A later try is linked to the first."""
        phases = each.phases
        start_s = phases[0].start_s if phases else 0.0
        end_s = phases[-1].start_s + phases[-1].duration_s if phases else 0.0
        links = [Span.Link(trace_id=self._traced.trace_id, span_id=first)] if first else None
        return self._span(
            f"try {each.number}",
            own,
            self._traced.span_id,
            (start_s, end_s),
            [
                *_placement(each),
                *self._region(each.worker_id),
                text("hearth.outcome", each.outcome),
            ],
            links=links,
        )

    def _phase(self, phase: Phase, parent: bytes, attributes: list[KeyValue]) -> Span:
        counts = {
            "hearth.num_bytes": phase.num_bytes,
            "hearth.num_tokens": phase.num_tokens,
            "hearth.num_steps": phase.num_steps,
        }
        attributes += pairs({name: count for name, count in counts.items() if count})
        times = (phase.start_s, phase.start_s + phase.duration_s)
        return self._span(phase.name, secrets.token_bytes(8), parent, times, attributes)

    def _span(
        self,
        name: str,
        span_id: bytes,
        parent_id: bytes,
        times: tuple[float, float],
        attributes: list[KeyValue],
        **fields: Any,
    ) -> Span:
        """`times`: start and end, in seconds after the request's arrival."""
        start_s, end_s = times
        return Span(
            name=name,
            trace_id=self._traced.trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            flags=_SAMPLED,
            start_time_unix_nano=self._started_ns + int(start_s * 1e9),
            end_time_unix_nano=self._started_ns + int(end_s * 1e9),
            attributes=attributes,
            **{"kind": Span.SpanKind.SPAN_KIND_INTERNAL, **fields},
        )

    def _region(self, process_id: str) -> list[KeyValue]:
        region = self._traced.regions.get(process_id)
        return [text("hearth.region", region)] if region else []

    def _role(self, phase: Phase, each: Try) -> str:
        if phase.process_id == self._timeline.gateway_id:
            return "gateway"
        if phase.name in _OF_SCHEDULERS:
            return "scheduler"
        return "prefill" if phase.process_id == each.prefill_worker_id else "decode"


def _attributes(timeline: Timeline) -> dict[str, Any]:
    """Of a request's span; the gateway adds those of its options."""
    attributes: dict[str, Any] = {
        "gen_ai.provider.name": "hearth",
        "gen_ai.request.model": timeline.model,
        "gen_ai.response.model": timeline.model,
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
        "http.response.status_code": timeline.status,
    }
    if timeline.num_reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = timeline.num_reasoning_tokens
    if timeline.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = timeline.ttft_s
    if timeline.status >= 400:
        attributes["error.type"] = timeline.outcome
    else:
        attributes["gen_ai.response.finish_reasons"] = (timeline.outcome,)
    return attributes


def _placement(each: Try) -> list[KeyValue]:
    placement_id = KeyValue(
        key="hearth.placement.id", value=AnyValue(string_value=each.placement_id)
    )
    return [text("hearth.worker.id", each.worker_id), placement_id]


@lru_cache(MAX_CACHED)
def text(name: str, value: str) -> KeyValue:
    return KeyValue(key=name, value=AnyValue(string_value=value))


def pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_any(value)) for name, value in attributes.items()]


def _any(value: str | int | float | bool | Sequence[str]) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=map(_any, value)))


@lru_cache(MAX_CACHED)
def resource(role: str, process_id: str) -> Resource:
    """With the attributes of OTEL_RESOURCE_ATTRIBUTES. No other process needs an SDK."""
    names = {"service.name": f"hearth-{role}", "service.instance.id": process_id}
    return Resource(attributes=pairs(SdkResource.create(names).attributes))
