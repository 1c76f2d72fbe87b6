"""Whether frames of one link go compressed: only where that is sure to be faster.

Of each byte of payload, compression saves (1 - ratio) bytes of wire and costs an encoding and a
decoding. All four are measured: on the link's own frames, on this host and on the receiver's.

    off ──saved > ON_MARGIN · cost──▶ on          a link too fast for any codec is never tried;
    on ──saved < OFF_MARGIN · cost──▶ off         on another, some frames now and then go compressed
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Smaller frames are neither compressed nor believed: latency outweighs their bytes.
MIN_FRAME_BYTES = 64 * 1024
NUM_RECENT = 9  # frames that a median is taken of, so that a stall or two change nothing
NUM_NEEDED = (
    3  # before a link's speed is believed; a codec's needs all, as it starts in cold memory
)
ON_MARGIN = 1.5
OFF_MARGIN = 1.1
# A codec that does not pay is measured anew after so many frames, each time after twice as many.
FIRST_PAUSE, LAST_PAUSE = 32, 1024
# The best to be hoped for: Shannon's bound for KV of trained models, at 8 GB/s there and back.
BEST_RATIO = 0.67
BEST_CODEC_S = 0.25e-9


class Recent:
    """The median of the last values; those that are no numbers, or negative, do not count."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, value: float) -> None:
        if 0 <= value < math.inf:
            self._values.append(value)

    def has(self, num_values: int) -> bool:
        return len(self._values) >= num_values

    @property
    def median(self) -> float:
        return statistics.median(self._values)


class WireTimes:
    """How long each frame's bytes took on the wire, from when it was sent and when it arrived.

    A link is a queue: bytes leave in order, and arrive `latency_s` later. So a frame's own time
    begins when it could first have arrived, or the one before it did. The latency is the shortest
    round trip ever seen; were it too long, the link would seem faster than it is, never slower.
    """

    def __init__(self, round_trip_s: float) -> None:
        self._latency_s = round_trip_s
        self._last_arrival = -math.inf

    def arrived(self, sent_at: float, arrived_at: float) -> float:
        """Seconds on the wire. Frames are told in the order they were sent."""
        self._latency_s = min(self._latency_s, max(0.0, arrived_at - sent_at))
        begun_at = max(self._last_arrival, sent_at + self._latency_s)
        self._last_arrival = max(self._last_arrival, arrived_at)
        return max(0.0, arrived_at - begun_at)


class CompressionGate:
    """Speeds in seconds a byte: of the wire's for the link, of the payload's for the codec."""

    def __init__(self) -> None:
        self.is_on = False
        self._wire, self._ratio = Recent(), Recent()
        self._encode, self._decode = Recent(), Recent()
        self._num_paused = 0
        self._pause = FIRST_PAUSE

    def takes(self, payload_bytes: int) -> bool:
        """Whether the next frame, of this size, is to be encoded."""
        if payload_bytes < MIN_FRAME_BYTES:
            return False
        if self.is_on:
            return True
        if not self._may_pay():
            return False
        if self._is_measured:
            self._num_paused += 1
            if self._num_paused < self._pause:
                return False
            self._measure_anew()
        return True

    def carried(self, wire_bytes: int, seconds: float) -> None:
        if wire_bytes >= MIN_FRAME_BYTES // 2:
            self._wire.add(seconds / wire_bytes)
            self._decide()

    def encoded(self, payload_bytes: int, wire_bytes: int, seconds: float) -> None:
        """`wire_bytes` are the payload's where the code was no shorter."""
        self._ratio.add(wire_bytes / payload_bytes)
        self._encode.add(seconds / payload_bytes)
        if wire_bytes == payload_bytes:
            self._decode.add(0.0)  # nothing to decode; what is lost is the encoding
        self._decide()

    def decoded(self, payload_bytes: int, seconds: float) -> None:
        self._decode.add(seconds / payload_bytes)
        self._decide()

    @property
    def _is_measured(self) -> bool:
        return all(each.has(NUM_RECENT) for each in (self._ratio, self._encode, self._decode))

    def _may_pay(self) -> bool:
        if not self._wire.has(NUM_NEEDED):
            return False
        return (1 - BEST_RATIO) * self._wire.median > ON_MARGIN * BEST_CODEC_S

    def _measure_anew(self) -> None:
        self._ratio, self._encode, self._decode = Recent(), Recent(), Recent()
        self._num_paused, self._pause = 0, min(2 * self._pause, LAST_PAUSE)

    def _decide(self) -> None:
        if not (self._wire.has(NUM_NEEDED) and self._is_measured):
            return
        saved_s = (1 - self._ratio.median) * self._wire.median
        codec_s = self._encode.median + self._decode.median
        self.is_on = saved_s > (OFF_MARGIN if self.is_on else ON_MARGIN) * codec_s
        if self.is_on:
            self._pause = FIRST_PAUSE
