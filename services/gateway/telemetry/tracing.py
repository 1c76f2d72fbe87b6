"""The seam of tracing: off, nothing of OpenTelemetry is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from services.gateway.telemetry.trace_context import TraceContext
from shared.telemetry.timeline import Timeline

log = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing(Protocol):
    num_dropped: int  # spans

    def start(self, header: str | None) -> TraceContext:
        """Continues the caller's trace, or begins one."""
        ...

    def ended(
        self,
        timeline: Timeline,
        context: TraceContext,
        attributes: Mapping[str, str | int | float | bool],
    ) -> None: ...

    def close(self) -> None: ...


def open_tracing(
    environ: Mapping[str, str], random_bytes: Callable[[int], bytes]
) -> Tracing | None:
    """None unless OTEL_… variables name a collector."""
    is_off = (
        not any(environ.get(name) for name in ENDPOINTS)
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
    if is_off:
        return None
    try:
        from services.gateway.telemetry.span_exporter import SpanTracing
    except ImportError as error:
        log.warning("tracing_unavailable", error=str(error), install="hearth[tracing]")
        return None
    return SpanTracing(random_bytes)
