"""The sender's end of compressed frames: encodes what the link's gate takes, and tells it how long
everything took.

Only TCP links have it: through shared memory a frame is as fast as its copy.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from shared.clock import Clock
from shared.kv_wire.compression_gate import CompressionGate, WireTimes
from shared.kv_wire.frames import Ack
from shared.kv_wire.link import CompressionCounts
from shared.kv_wire.pieces import grown, to_the_end


class FrameCodec(Protocol):
    """Lossless, for one kind of payload. The engine's, for it knows what KV looks like."""

    @property
    def name(self) -> str:
        """What both ends of a link agree on."""
        ...

    def encode(self, payload: memoryview, out: memoryview) -> int:
        """Bytes written to `out`, or 0 if they would not be fewer. `out` is as long as the payload.

        Runs on a thread, and leaves Python's lock.
        """
        ...

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        """Fills `out`, as long as the payload was; False if `coded` is damaged.

        Runs on a thread, and leaves Python's lock.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    payload_bytes: int
    wire_bytes: int
    is_coded: bool
    sent_at: float


class LinkCompression:
    def __init__(
        self, codec: FrameCodec, clock: Clock, counts: CompressionCounts, *, round_trip_s: float
    ) -> None:
        self.codec_name = codec.name
        self.gate = CompressionGate()
        self._codec = codec
        self._clock = clock
        self._counts = counts
        self._times = WireTimes(round_trip_s)
        self._buffers: dict[int, memoryview] = {}  # of each slot that had a compressed frame
        self._sent: dict[int, _Sent] = {}

    async def coded(self, slot_index: int, payload: memoryview) -> memoryview | None:
        """The frame to send in place of the slot's payload, or None: as it is.

        It is the slot's, and stays as it is until the slot's next frame.
        """
        if not self.gate.takes(len(payload)):
            return None
        out = grown(self._buffers.get(slot_index, memoryview(b"")), len(payload))
        self._buffers[slot_index] = out
        loop, start = asyncio.get_running_loop(), self._clock.now()
        encode = loop.run_in_executor(None, self._codec.encode, payload, out[: len(payload)])
        num_bytes = await to_the_end(encode)
        wire_bytes = num_bytes or len(payload)
        self.gate.encoded(len(payload), wire_bytes, self._clock.now() - start)
        return out[:num_bytes] if num_bytes else None

    def sent(self, frame_id: int, payload_bytes: int, coded: memoryview | None) -> None:
        wire_bytes = payload_bytes if coded is None else len(coded)
        sent = _Sent(payload_bytes, wire_bytes, coded is not None, self._clock.now())
        self._sent[frame_id] = sent
        if coded is not None:
            self._counts.num_frames += 1
            self._counts.num_saved_bytes += payload_bytes - wire_bytes

    def acknowledged(self, ack: Ack) -> None:
        """The receiver says how long it has held the frame: that is not the link's time."""
        sent = self._sent.pop(ack.frame_id, None)
        if sent is None:
            return
        wire_s = self._times.arrived(sent.sent_at, self._clock.now() - max(0.0, ack.held_s))
        self.gate.carried(sent.wire_bytes, wire_s)
        if sent.is_coded:
            self.gate.decoded(sent.payload_bytes, ack.decode_s)

    def refused(self, frame_id: int) -> None:
        self._sent.pop(frame_id, None)
