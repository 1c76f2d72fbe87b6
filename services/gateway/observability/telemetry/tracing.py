"""The interface of tracing. OpenTelemetry is imported only if tracing is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from services.gateway.observability.telemetry.trace_context import TraceContext
from services.gateway.observability.telemetry.traced_request import AttributeValue
from shared.clock import Clock
from shared.telemetry.timeline import Timeline

log = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing(Protocol):
    num_dropped: int  # spans

    async def open(self) -> None: ...

    def begin(self, header: str | None) -> TraceContext | None:
        """Continues the caller's trace or begins a new one. Returns None if a new one is not
        sampled.
        """
        ...

    def ended(
        self,
        timeline: Timeline,
        encoded: bytes,
        context: TraceContext,
        attributes: Mapping[str, AttributeValue],
        regions: Mapping[str, str],
    ) -> None:
        """Exports an ended request's spans, unless the trace is not sampled. `encoded` is the
        encoded timeline; `regions` has the regions of its processes by id.
        """
        ...

    async def close(self) -> None: ...


def open_tracing(
    environ: Mapping[str, str],
    process_id: str,
    random_bytes: Callable[[int], bytes],
    clock: Clock,
) -> Tracing | None:
    """Returns the tracing, or None unless `OTEL_…` variables name a collector and the extra
    `tracing` is installed.
    """
    is_off = (
        not any(environ.get(name) for name in ENDPOINTS)
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
    if is_off:
        return None
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401  # the span process needs it

        from services.gateway.observability.telemetry.span_exporter import SpanTracing
    except ImportError as error:
        install = "pip install '.[tracing]' in the clone"
        log.warning("tracing_unavailable", error=str(error), install=install)
        return None
    return SpanTracing(process_id, random_bytes, clock)
