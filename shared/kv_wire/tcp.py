"""KV between hosts: payloads follow their record on the connection.

The receiver sums a payload while it arrives, directly in a private buffer. It has a buffer for each
frame that the sender may have in flight, so it never pauses reading: a paused connection would not
reveal that its peer has died. The last used buffer is reused first, so few are allocated. A
compressed payload is decoded from its buffer, on a thread, into a separate buffer. A sealed payload
is opened in place, in one pass on the event loop: with AES instructions 2 MiB take 0.2 ms, less
than moving them to another core's cache. Larger ones, of devices, are opened on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from typing import TYPE_CHECKING

from shared.clock import Clock
from shared.errors import LinkLost
from shared.kv_wire.checked_copy import apart_if_large, checksum_of, grown, to_the_end, zero
from shared.kv_wire.compression import FrameCodec
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.kv_wire.frame_delivery import Arrival, FrameDelivery
from shared.kv_wire.frames import Frame, Offer, ProtocolError, Record, sealed_sum
from shared.kv_wire.link import FRAME_BYTES, MAX_FRAME_BYTES, FrameHeader, PageLock
from shared.kv_wire.record_stream import RecordStream
from shared.kv_wire.sealing.cipher_choice import TAG_BYTES
from shared.kv_wire.shared_memory import allocate_locked, frames_under_way

if TYPE_CHECKING:
    from shared.kv_wire.sealing.ciphers import LinkCiphers

NUM_SLOTS = 4
# Timeout for a host that vanished or a process that stopped reading.
DEAD_HOST_S = 10


def tune(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, and sets timeouts that end connections to vanished hosts."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", DEAD_HOST_S // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", DEAD_HOST_S // 2),
        ("TCP_USER_TIMEOUT", DEAD_HOST_S * 1000),
    ):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _Buffers:
    """Allocates buffers of payloads and their tags: in the size of the frames, or in the largest
    size and page-locked, from and to which a device copies.
    """

    def __init__(self, max_frame_bytes: int, page_lock: PageLock | None) -> None:
        self._num_bytes = max_frame_bytes + TAG_BYTES
        self._page_lock = page_lock

    def grown(self, buffer: memoryview, num_bytes: int) -> memoryview:
        """Returns the buffer if it has `num_bytes`, else a new one."""
        if self._page_lock is None or len(buffer) >= num_bytes:
            return grown(buffer, num_bytes)
        return allocate_locked(self._page_lock, self._num_bytes)


class TcpStaging:
    """The sender's private slots, allocated on demand."""

    def __init__(
        self,
        num_slots: int,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        frame_bytes: int = FRAME_BYTES,
        page_lock: PageLock | None = None,
    ) -> None:
        self.num_slots, self.max_frame_bytes = num_slots, max_frame_bytes
        self.frame_bytes = frame_bytes
        self.frames_under_way = frames_under_way(frame_bytes, num_slots)
        self._allocation = _Buffers(max_frame_bytes, page_lock)
        self._buffers = [memoryview(b"") for _ in range(num_slots)]

    def view(self, slot_index: int, num_bytes: int) -> memoryview:
        buffer = self._allocation.grown(self._buffers[slot_index], num_bytes + TAG_BYTES)
        self._buffers[slot_index] = buffer
        return buffer[:num_bytes]

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None:
        num_bytes = header.payload_bytes + stream.tag_bytes
        stream.send(Frame(frame_id, header), self._buffers[slot_index][:num_bytes])

    def close(self) -> None:
        self._buffers = [memoryview(b"") for _ in range(self.num_slots)]


class TcpReception:
    """The receiver's end of one connection: owns its stream and its buffers."""

    def __init__(
        self,
        placements: ExpectedPushes,
        clock: Clock,
        codec: FrameCodec | None = None,
        ciphers: LinkCiphers | None = None,
        peer_region: str = "",
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        page_lock: PageLock | None = None,
    ) -> None:
        self.stream = RecordStream(self, ciphers)
        self.deliveries = FrameDelivery(
            placements, self.stream, clock, peer_region, max_frame_bytes=max_frame_bytes
        )
        self._allocation = _Buffers(max_frame_bytes, page_lock)
        self._codec = codec
        self._clock = clock
        self._decoded = memoryview(b"")
        self._free = [memoryview(b"")] * NUM_SLOTS
        self._arriving: tuple[Frame, memoryview] | None = None

    def record_arrived(self, record: Record) -> memoryview | None:
        if isinstance(record, Offer):
            self.deliveries.offered(record)
            return None
        if not isinstance(record, Frame) or record.slot_index is not None:
            raise ProtocolError(f"a sender does not send {type(record).__name__} here")
        if record.codec and (self._codec is None or record.codec != self._codec.name):
            raise ProtocolError(f"codec {record.codec[:100]!r} was not offered")
        self.deliveries.announce(record)
        if not self._free:
            raise ProtocolError(f"more than {NUM_SLOTS} frames are in flight")
        num_bytes = record.wire_bytes + self.stream.tag_bytes
        buffer = self._allocation.grown(self._free.pop(), num_bytes)
        self._arriving = (record, buffer)
        return buffer[:num_bytes]

    def payload_arrived(self, checksum: int) -> None:
        assert self._arriving is not None, "a payload follows its record"
        (frame, buffer), self._arriving = self._arriving, None

        async def take_copy() -> tuple[memoryview, int | None]:
            payload = buffer[: frame.wire_bytes]
            ciphers = self.stream.ciphers
            if ciphers is not None and not await self._is_opened(ciphers, frame, buffer):
                return payload, None
            if frame.codec:
                return await self._decode(arrival, payload)
            return payload, self._sum_of_frame(frame.header, checksum)

        release, drop = partial(self._release, frame, buffer), partial(self._drop, frame, buffer)
        arrival = Arrival(frame, take_copy, release, drop)
        self.deliveries.add(arrival)

    def _release(self, frame: Frame, buffer: memoryview, is_private: bool) -> None:
        if is_private:
            zero(self._decoded[: frame.header.payload_bytes if frame.codec else 0])
        self._drop(frame, buffer, is_private)

    def _drop(self, frame: Frame, buffer: memoryview, is_private: bool) -> None:
        """Frees the buffer of a frame that was not decoded."""
        if is_private:
            zero(buffer[: frame.wire_bytes])
        self._free.append(buffer)

    def ended(self, error: LinkLost) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            frame, buffer = arriving
            self._drop(frame, buffer, self.deliveries.is_private(frame))
        self.deliveries.end(error)

    async def _is_opened(self, ciphers: LinkCiphers, frame: Frame, buffer: memoryview) -> bool:
        sealed = buffer[: frame.wire_bytes + TAG_BYTES]
        return await apart_if_large(sealed, ciphers.opening.open_payload, frame.frame_id, sealed)

    def _sum_of_frame(self, header: FrameHeader, payload_sum: int) -> int:
        """Returns the checksum of a frame. A sealed frame is verified already, and has no
        checksum.
        """
        return sealed_sum(header, payload_sum) if self.stream.ciphers is None else header.checksum

    async def _decode(self, arrival: Arrival, coded: memoryview) -> tuple[memoryview, int | None]:
        """Decodes into the one shared buffer: the previous delivery has ended."""
        assert self._codec is not None, "only offered codecs are accepted"
        header, start = arrival.frame.header, self._clock.now()
        self._decoded = grown(self._decoded, header.payload_bytes)
        payload = self._decoded[: header.payload_bytes]
        loop = asyncio.get_running_loop()
        decode = loop.run_in_executor(None, self._codec.decode, coded, payload)
        checksum = None
        if await to_the_end(decode):
            checksum = self._sum_of_frame(header, checksum_of(payload))
        arrival.decode_s = self._clock.now() - start
        return payload, checksum
