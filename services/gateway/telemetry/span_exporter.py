"""Samples traces, and sends spans to a collector on a thread.

A request only puts its timeline into a bounded queue. A collector that is away, hangs or rejects
costs spans, which are counted, and no request.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from services.gateway.telemetry.spans import Attributes, SpanBuilder, num_spans
from services.gateway.telemetry.trace_context import TraceContext, caller_context
from shared.telemetry.timeline import Timeline

log = structlog.get_logger(__name__)

MAX_QUEUED = 1024  # requests
MAX_BATCH = 64  # requests
CLOSE_S = 5.0

Ended = tuple[Timeline, TraceContext, Attributes]


class SpanTracing:
    """Configured by `OTEL_…` variables, which the SDK reads."""

    def __init__(self, random_bytes: Callable[[int], bytes], max_queued: int = MAX_QUEUED) -> None:
        self._random_bytes = random_bytes
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._exporter = OTLPSpanExporter()
        self._queue: queue.Queue[Ended | None] = queue.Queue(max_queued)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def start(self, header: str | None) -> TraceContext:
        caller = caller_context(header)
        trace_id = self._random_bytes(16) if caller is None else caller.trace_id
        parent = None if caller is None else trace.set_span_in_context(_remote(caller))
        decision = self._sampler.should_sample(parent, int.from_bytes(trace_id, "big"), "chat")
        return TraceContext(
            trace_id,
            self._random_bytes(8),
            decision.decision.is_sampled(),
            b"" if caller is None else caller.span_id,
        )

    def ended(self, timeline: Timeline, context: TraceContext, attributes: Attributes) -> None:
        """Does nothing for a trace that is not sampled."""
        if not context.is_sampled:
            return
        try:
            self._queue.put_nowait((timeline, context, attributes))
        except queue.Full:
            self.num_dropped += num_spans(timeline)

    def close(self) -> None:
        """Waits at most CLOSE_S for what is queued."""
        self._exporter_stops = threading.Timer(CLOSE_S / 2, self._exporter.shutdown)
        self._exporter_stops.daemon = True
        self._exporter_stops.start()
        try:
            self._queue.put(None, timeout=CLOSE_S / 2)
        except queue.Full:
            return
        self._thread.join(CLOSE_S / 2)
        self._exporter_stops.cancel()

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            batch = [ended]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._export(batch)
                    return
                batch.append(following)
            self._export(batch)

    def _export(self, batch: list[Ended]) -> None:
        try:
            spans = [span for each in batch for span in SpanBuilder(*each).build()]
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # the thread's boundary: spans are lost, requests are not
            log.exception("span_export_failed")
            is_sent = False
        if not is_sent:
            self.num_dropped += sum(num_spans(timeline) for timeline, _, _ in batch)


def _remote(caller: TraceContext) -> NonRecordingSpan:
    return NonRecordingSpan(
        SpanContext(
            int.from_bytes(caller.trace_id, "big"),
            int.from_bytes(caller.span_id, "big"),
            is_remote=True,
            trace_flags=TraceFlags(int(caller.is_sampled)),
        )
    )
