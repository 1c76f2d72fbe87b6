"""KV between hosts: payloads follow their record on the connection.

The receiver sums a payload while it arrives, straight in a private buffer. It has a buffer for each
frame that the sender may have under way, so it never stops reading: a connection whose reading is
paused would not show that its peer has died. The buffer used last is the next, so few are touched.
"""

from __future__ import annotations

import contextlib
import socket

from shared.errors import LinkLost
from shared.kv_wire.deliveries import Arrival, Deliveries
from shared.kv_wire.frames import Frame, ProtocolError, Record, sealed_sum
from shared.kv_wire.link import FrameHeader
from shared.kv_wire.pieces import grown
from shared.kv_wire.placements import Placements
from shared.kv_wire.stream import RecordStream

NUM_SLOTS = 4
# A host that vanished, or a process that has stopped reading, is given up after this long.
DEAD_HOST_S = 10


def tune(sock: socket.socket) -> None:
    """No delay for records, and an end to connections whose host vanished."""
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


class TcpStaging:
    """The sender's private slots, made on demand and as large as the frames need."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._buffers = [memoryview(b"") for _ in range(num_slots)]

    def view(self, slot_index: int, num_bytes: int) -> memoryview:
        buffer = grown(self._buffers[slot_index], num_bytes)
        self._buffers[slot_index] = buffer
        return buffer[:num_bytes]

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None:
        stream.send(Frame(frame_id, header), self.view(slot_index, header.payload_bytes))

    def close(self) -> None:
        self._buffers = [memoryview(b"") for _ in range(self.num_slots)]


class TcpReception:
    """The receiver's end of one connection: owner of its stream and its buffers."""

    def __init__(self, placements: Placements) -> None:
        self.stream = RecordStream(self)
        self.deliveries = Deliveries(placements, self.stream)
        self._free = [memoryview(b"")] * NUM_SLOTS
        self._arriving: tuple[Frame, memoryview] | None = None

    def record_arrived(self, record: Record) -> memoryview:
        if not isinstance(record, Frame) or record.slot_index is not None:
            raise ProtocolError(f"a sender does not send {type(record).__name__} here")
        self.deliveries.announce(record)
        if not self._free:
            raise ProtocolError(f"more than {NUM_SLOTS} frames are under way")
        buffer = grown(self._free.pop(), record.header.payload_bytes)
        self._arriving = (record, buffer)
        return buffer[: record.header.payload_bytes]

    def payload_arrived(self, checksum: int) -> None:
        assert self._arriving is not None, "a payload follows its record"
        (frame, buffer), self._arriving = self._arriving, None

        async def take_copy() -> tuple[memoryview, int]:
            header = frame.header
            return buffer[: header.payload_bytes], sealed_sum(header, checksum)

        self.deliveries.add(Arrival(frame, take_copy, lambda: self._free.append(buffer)))

    def ended(self, error: LinkLost) -> None:
        self.deliveries.end(error)
