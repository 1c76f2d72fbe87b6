"""Decides whether the frames of one link are compressed: only where that is measured to be faster.

The saved wire time is measured on pairs: two consecutive frames of equal size, only one of them
compressed. Delays that do not depend on the number of bytes (network jitter, a peer that reads its
socket late) are in both and cancel. The saving must exceed the time of one encoding and one
decoding, measured on this host and on the receiver's.

    off: on a wire too fast for any codec, no frame is compressed; on any other, at most every
         second frame, so that encoding and decoding take TRIAL_SHARE of the link's time, plus the
         time of one frame at the beginning
    off ──three of four pairs saved more than ON_MARGIN · codec──▶ on
    on: all frames but every UNCOMPRESSED_EVERY-th, which serves as the comparison
    on ──half of the pairs saved less than OFF_MARGIN · codec, or the wire is too fast──▶ off
"""

from __future__ import annotations

import math
from collections import deque

# Smaller frames are neither compressed nor measured: latency dominates their transfer time.
MIN_FRAME_BYTES = 64 * 1024
# One or two stalls do not move the median of 9 times; the difference of a pair is small compared
# with the noise of each, so more pairs are needed.
NUM_RECENT, NUM_PAIRS = 9, 25
NUM_NEEDED = 3  # estimates of NUM_RECENT that a first decision needs
ON_MARGIN, OFF_MARGIN = 1.5, 1.1
TRIAL_SHARE = 0.02
REJECTED_COST = 10  # wire times: a receiver that rejects compressed frames seldom gets one
UNCOMPRESSED_EVERY = 16
# The best case: Shannon's bound for KV of trained models, at 8 GB/s each for encode and decode.
BEST_RATIO = 0.67
BEST_CODEC_S = 0.25e-9


class Recent:
    """Quantiles of the last values."""

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
        """Returns the quantile at `share`: this share of the values is less."""
        return sorted(self._values)[int(share * len(self._values))]


class WireTimes:
    """The wire time of each frame, from the times at which it was sent and arrived.

    A link is a queue: bytes leave in order, and arrive `latency_s` later. So the time of a frame
    starts at its earliest possible arrival, or at the arrival of the previous frame if later. The
    latency is the shortest round trip measured; if it is too long, the link seems faster than it
    is, never slower.
    """

    def __init__(self, round_trip_s: float) -> None:
        self._latency_s = round_trip_s
        self._last_arrival = -math.inf

    def arrived(self, sent_at: float, arrived_at: float) -> float:
        """Returns seconds on the wire. Receivers acknowledge frames in the order they were sent."""
        self._latency_s = min(self._latency_s, max(0.0, arrived_at - sent_at))
        begun_at = max(self._last_arrival, sent_at + self._latency_s)
        self._last_arrival = max(self._last_arrival, arrived_at)
        return max(0.0, arrived_at - begun_at)


class CompressionGate:
    """All times are stored in seconds per byte: of wire bytes for the wire, else of payload."""

    def __init__(self) -> None:
        self.is_on = False
        self._wire, self._saved = Recent(NUM_RECENT), Recent(NUM_PAIRS)
        self._encode, self._decode = Recent(NUM_RECENT), Recent(NUM_RECENT)
        self._last = 0, False, 0.0  # the last frame's payload, whether coded, seconds per byte
        self._num_frames = 0
        self._trial_s = 0.0  # budget for encoding and decoding

    def takes(self, payload_bytes: int) -> bool:
        """Whether to encode the next frame, which has this size."""
        if payload_bytes < MIN_FRAME_BYTES or self._is_fast:
            return False
        self._num_frames += 1
        if self.is_on:
            return self._num_frames % UNCOMPRESSED_EVERY > 0
        return self._num_frames % 2 == 0 and self._trial_s > 0

    def encoded(self, payload_bytes: int, seconds: float) -> None:
        self._encode.add(seconds / payload_bytes)
        self._trial_s -= seconds

    def decoded(self, payload_bytes: int, seconds: float) -> None:
        seconds = max(0.0, seconds)  # reported by the receiver
        self._decode.add(seconds / payload_bytes)
        self._trial_s -= seconds

    def incompressible(self) -> None:
        """Records an encoding without saving; the frame is sent uncompressed."""
        self._saved.add(0.0)

    def carried(self, payload_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Records a delivered frame; call in the order the frames were sent."""
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

    def rejected(self, seconds: float) -> None:
        """Records that the receiver rejected a compressed frame, after `seconds` on the wire."""
        self._saved.add(0.0)
        self._trial_s -= REJECTED_COST * seconds
        self._decide()

    @property
    def _is_fast(self) -> bool:
        """The wire is too fast for any codec, or its speed is not known yet."""
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
            self.is_on, self._num_frames, self._trial_s = is_on, 0, 0.0
