"""The W3C trace context of one request. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The ids of a trace: 16 bytes of `trace_id`, 8 of `span_id`, the gateway's span, and 8 of
    `parent_id`, the caller's span, or none without a caller.
    """

    trace_id: bytes
    span_id: bytes
    is_sampled: bool
    parent_id: bytes = b""

    @property
    def encoded(self) -> bytes:
        """The 25 bytes of `Request.traceparent`."""
        return self.trace_id + self.span_id + bytes((self.is_sampled,))


def caller_context(header: str | None) -> TraceContext | None:
    """Returns the context of the caller's header, or None if it is absent or invalid."""
    found = None if not header or len(header) > 55 else _HEADER.fullmatch(header)
    if found is None:
        return None
    trace_id, span_id, flags = map(bytes.fromhex, found.groups())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(flags[0] & _SAMPLED))
