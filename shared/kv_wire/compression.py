"""The sender's end of compressed frames: encodes the frames that the link's gate selects, and
reports all durations to the gate.

Only TCP links compress: through shared memory a frame takes no longer than its copy.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from shared.clock import Clock
from shared.kv_wire.checked_copy import grown, to_the_end
from shared.kv_wire.compression_gate import CompressionGate, WireTimes
from shared.kv_wire.frames import Ack, Refusal
from shared.kv_wire.link import CompressionCounts
from shared.kv_wire.sealing.cipher_choice import TAG_BYTES


class FrameCodec(Protocol):
    """Lossless, for one kind of payload. The engine implements it, as it knows the KV's layout."""

    @property
    def name(self) -> str:
        """The name by which both ends of a link agree on the codec."""
        ...

    def encode(self, payload: memoryview, out: memoryview) -> int:
        """Returns the bytes written to `out`, or 0 if they would not be fewer than the payload's.

        `out` is as long as the payload. Runs on a thread and releases the GIL.
        """
        ...

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        """Fills `out`, which has the payload's length; returns False if `coded` is damaged.

        Runs on a thread and releases the GIL.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    payload_bytes: int
    wire_bytes: int
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
        self._buffers: dict[int, memoryview] = {}  # buffers of slots that had a compressed frame

    def buffer_of(self, slot_index: int) -> memoryview:
        """Returns the buffer of this slot's compressed payload, at least TAG_BYTES longer than
        it.
        """
        return self._buffers[slot_index]

    def last_coded(self, slot_index: int) -> memoryview:
        """Returns the whole buffer of this slot, empty if it never had a compressed frame."""
        return self._buffers.get(slot_index, memoryview(b""))

    async def coded(self, slot_index: int, payload: memoryview) -> memoryview | None:
        """Returns the compressed payload to send, or None to send the slot's payload uncompressed.

        The buffer belongs to the slot and does not change until the slot's next frame.
        """
        if not self.gate.takes(len(payload)):
            return None
        out = grown(self._buffers.get(slot_index, memoryview(b"")), len(payload) + TAG_BYTES)
        self._buffers[slot_index] = out
        loop, start = asyncio.get_running_loop(), self._clock.now()
        encode = loop.run_in_executor(None, self._codec.encode, payload, out[: len(payload)])
        num_bytes = await to_the_end(encode)
        self.gate.encoded(len(payload), self._clock.now() - start)
        if not num_bytes:
            self.gate.incompressible()
            return None
        return out[:num_bytes]

    def sent(self, payload: memoryview, coded: memoryview | None) -> Sent:
        """Records a frame that is sent now; the link passes the result to `answered`."""
        wire_bytes = len(payload) if coded is None else len(coded)
        if coded is not None:
            self._counts.num_frames += 1
            self._counts.num_saved_bytes += len(payload) - wire_bytes
        return Sent(len(payload), wire_bytes, self._clock.now())

    def answered(self, sent: Sent, answer: Ack | Refusal) -> None:
        """Reports to the gate. The time `held_s` at the receiver does not count as wire time."""
        arrived_at = self._clock.now() - max(0.0, answer.held_s)
        wire_s = self._times.arrived(sent.sent_at, arrived_at)
        is_coded = sent.wire_bytes < sent.payload_bytes
        match answer:
            case Ack(decode_s=decode_s):
                if is_coded:
                    self.gate.decoded(sent.payload_bytes, decode_s)
                self.gate.carried(sent.payload_bytes, sent.wire_bytes, wire_s)
            case Refusal() if is_coded:
                self.gate.rejected(wire_s)
