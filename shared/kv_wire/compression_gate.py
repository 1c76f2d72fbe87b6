"""Whether frames of one link go compressed: only where that is measured to be faster.

Two frames of one size, one right behind the other and only one of them compressed, tell what is
saved on the wire. What takes as long however few the bytes (a network's jitter, a peer that comes
late to its socket) is in both, and does not count. It has to outweigh an encoding and a decoding,
as they were measured on this host and on the receiver's.

    off: none goes compressed on a wire too fast for any codec; on another so many, at most every
         second, that encoding and decoding take TRIAL_SHARE of the link's time, and as long as one
         frame at the beginning
    off ──three of four pairs saved more than ON_MARGIN · codec──▶ on
    on: all but every PLAIN_EVERY-th, with which the others are compared
    on ──half of the pairs saved less than OFF_MARGIN · codec, or the wire is too fast──▶ off
"""

from __future__ import annotations

import math
from collections import deque

# Smaller frames are neither compressed nor measured: latency outweighs their bytes.
MIN_FRAME_BYTES = 64 * 1024
# Of so many times the middle does not move for a stall or two; of pairs, whose difference is small
# beside the noise of each, it takes more.
NUM_RECENT, NUM_PAIRS = 9, 25
NUM_NEEDED = 3  # of the first, for a hint
ON_MARGIN, OFF_MARGIN = 1.5, 1.1
TRIAL_SHARE = 0.02
REFUSED_COST = 10  # times on the wire: whoever refuses compressed frames is seldom sent one
PLAIN_EVERY = 16
# The best to be hoped for: Shannon's bound for KV of trained models, at 8 GB/s there and back.
BEST_RATIO = 0.67
BEST_CODEC_S = 0.25e-9


class Recent:
    """The last values, in the order of their size."""

    def __init__(self, max_values: int) -> None:
        self._values: deque[float] = deque(maxlen=max_values)

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._values.append(value)

    def has(self, num_values: int) -> bool:
        return len(self._values) >= num_values

    @property
    def is_full(self) -> bool:
        return len(self._values) == self._values.maxlen

    @property
    def median(self) -> float:
        return self.above(1 / 2)

    def above(self, share: float) -> float:
        """What this share of them is less than."""
        return sorted(self._values)[int(share * len(self._values))]


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
        """Seconds on the wire. Receivers answer all frames in the order they were sent."""
        self._latency_s = min(self._latency_s, max(0.0, arrived_at - sent_at))
        begun_at = max(self._last_arrival, sent_at + self._latency_s)
        self._last_arrival = max(self._last_arrival, arrived_at)
        return max(0.0, arrived_at - begun_at)


class CompressionGate:
    """All times are kept in seconds a byte: of what travels for the wire, else of payload."""

    def __init__(self) -> None:
        self.is_on = False
        self._wire, self._saved = Recent(NUM_RECENT), Recent(NUM_PAIRS)
        self._encode, self._decode = Recent(NUM_RECENT), Recent(NUM_RECENT)
        self._last = 0, False, 0.0  # the last frame's payload, whether coded, seconds a byte
        self._num_asked = 0
        self._trial_s = 0.0  # may be spent on encoding and decoding

    def takes(self, payload_bytes: int) -> bool:
        """Whether the next frame, of this size, is to be encoded."""
        if payload_bytes < MIN_FRAME_BYTES or self._is_fast:
            return False
        self._num_asked += 1
        if self.is_on:
            return self._num_asked % PLAIN_EVERY > 0
        return self._num_asked % 2 == 0 and self._trial_s > 0

    def encoded(self, payload_bytes: int, seconds: float) -> None:
        self._encode.add(seconds / payload_bytes)
        self._trial_s -= seconds

    def decoded(self, payload_bytes: int, seconds: float) -> None:
        seconds = max(0.0, seconds)  # as the receiver says
        self._decode.add(seconds / payload_bytes)
        self._trial_s -= seconds

    def incompressible(self) -> None:
        """A frame was encoded for nothing, and goes as it is."""
        self._saved.add(0.0)

    def carried(self, payload_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Frames are told in the order they were sent."""
        if payload_bytes < MIN_FRAME_BYTES:
            return
        self._trial_s += seconds * (TRIAL_SHARE if self._wire.has(1) else 1)
        self._wire.add(seconds / wire_bytes)
        is_coded, byte_s = wire_bytes < payload_bytes, seconds / payload_bytes
        bytes_before, was_coded, byte_s_before = self._last
        if bytes_before == payload_bytes and was_coded != is_coded:
            self._saved.add(byte_s_before - byte_s if is_coded else byte_s - byte_s_before)
        self._last = payload_bytes, is_coded, byte_s
        self._decide()

    def refused(self, seconds: float) -> None:
        """A compressed frame that took so long on the wire was not wanted."""
        self._saved.add(0.0)
        self._trial_s -= REFUSED_COST * seconds
        self._decide()

    @property
    def _is_fast(self) -> bool:
        """Too fast for any codec, or not known yet."""
        if not self._wire.has(NUM_NEEDED):
            return True
        margin = OFF_MARGIN if self.is_on else ON_MARGIN
        return (1 - BEST_RATIO) * self._wire.median < margin * BEST_CODEC_S

    def _decide(self) -> None:
        if not (self._saved.is_full and self._encode.is_full and self._decode.is_full):
            return
        codec_s = self._encode.median + self._decode.median
        if self.is_on:
            is_on = not self._is_fast and self._saved.median > OFF_MARGIN * codec_s
        else:
            is_on = not self._is_fast and self._saved.above(1 / 4) > ON_MARGIN * codec_s
        if is_on != self.is_on:
            self.is_on, self._num_asked, self._trial_s = is_on, 0, 0.0
