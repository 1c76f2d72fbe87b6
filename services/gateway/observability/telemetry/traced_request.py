"""The messages between a gateway and its span process. No I/O.

gateway ──SIZE, TracedRequest──▶ span process ──spans──▶ collector
        ◀────────SETTLED──────── of each batch
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import msgspec

from shared.telemetry.timeline import Phase, Timeline

MIN_SPAN_S = 0.0001  # shorter phases have no span
SIZE = struct.Struct("!I")  # bytes of the next frame
SETTLED = struct.Struct("!II")  # requests that were sent or lost; their lost spans

AttributeValue = str | int | float | bool
_encode = msgspec.msgpack.Encoder().encode


class TracedRequest(msgspec.Struct, frozen=True, array_like=True):
    """An ended request for the span process. `timeline` is an encoded Timeline. `regions` are the
    regions of processes, by process id.
    """

    timeline: msgspec.Raw
    trace_id: bytes
    span_id: bytes
    parent_id: bytes  # empty if this span begins the trace
    attributes: Mapping[str, AttributeValue]
    regions: Mapping[str, str]

    @property
    def frame(self) -> bytes:
        data = _encode(self)
        return SIZE.pack(len(data)) + data


def shown(phases: Iterable[Phase]) -> list[Phase]:
    """Returns the phases that are long enough for a span."""
    return [each for each in phases if each.duration_s >= MIN_SPAN_S]


def num_spans(timeline: Timeline) -> int:
    phases = sum(len(shown(each.phases)) for each in timeline.tries)
    return 1 + len(shown(timeline.gateway_phases)) + len(timeline.tries) + phases
