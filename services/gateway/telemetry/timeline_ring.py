"""The last timelines of one gateway, encoded and compressed. No I/O."""

from __future__ import annotations

import zlib
from collections import OrderedDict

import msgspec

from shared.telemetry.timeline import Timeline

MAX_TIMELINES = 4096
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Timeline).decode


class TimelineRing:
    def __init__(self, max_timelines: int = MAX_TIMELINES) -> None:
        self._max_timelines = max_timelines
        self._encoded: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._encoded)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._encoded.values()))

    def add(self, timeline: Timeline) -> None:
        """Replaces one of the same request; forgets the oldest."""
        self._encoded[timeline.request_id] = zlib.compress(_encode(timeline), level=1)
        self._encoded.move_to_end(timeline.request_id)
        if len(self._encoded) > self._max_timelines:
            self._encoded.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        encoded = self._encoded.get(request_id)
        return None if encoded is None else _decode(zlib.decompress(encoded))
