"""The W3C's trace context of one request. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`span_id`: of the gateway's span; `parent_id`: of the caller's, empty without a caller."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool
    parent_id: bytes = b""

    @property
    def encoded(self) -> bytes:
        """For `Request.traceparent`."""
        return self.trace_id + self.span_id + bytes((self.is_sampled,))


def caller_context(header: str | None) -> TraceContext | None:
    """None if there is no header, or none that is valid: a new trace begins."""
    found = None if not header or len(header) > 55 else _HEADER.fullmatch(header)
    if found is None:
        return None
    trace_id, span_id, flags = map(bytes.fromhex, found.groups())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(flags[0] & _SAMPLED))
