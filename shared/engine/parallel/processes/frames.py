"""Messages and records over a stream socket between hosts: what a datagram and a ring are on one.

    frame: length u32 | bytes

A record travels in the parts of `records.py`, with the same numbers and checksums as in a ring.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time

from shared.engine.parallel.processes.records import (
    HEADER,
    Assembly,
    Record,
    decode_part,
    encode_parts,
)

PART_BYTES = 256 * 1024
MAX_FRAME_BYTES = PART_BYTES + HEADER.size
READ_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class ConnectionLost(Exception):
    """The other end has closed the connection, or sent what is no frame."""


class FrameSocket:
    """A connection with a thread each for sending and receiving. `limit_s` is the limit of a
    send.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        connection.settimeout(None)  # Python's own limit would hold for `take`, too
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_lost_hosts(connection)
        self._socket = connection
        self._received = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_room(self, num_bytes: int) -> bool:
        """Whether `send` of a frame would not wait for the other end.

        A connection is writable while a third of its buffer is free, where segments take up to four
        times the bytes that they carry.
        """
        buffer_bytes = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        fits = 4 * num_bytes <= buffer_bytes // 3
        return fits and bool(select.select([], [self._socket], [], 0)[1])

    def send(self, data: bytes) -> None:
        """Raises ConnectionLost."""
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ConnectionLost(f"it cannot be sent to: {error}") from None

    def take(self) -> bytes | None:
        """Returns the next frame that has come; None if there is none. Raises ConnectionLost."""
        while (frame := self._frame()) is None:
            try:
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise ConnectionLost(str(error)) from None
            if not data:
                raise ConnectionLost("it has closed the connection")
            self._received += data
        return frame

    def receive(self, limit_s: float) -> bytes:
        """Returns the next frame. Raises ConnectionLost, also after the limit."""
        deadline = time.monotonic() + limit_s
        while (frame := self.take()) is None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                raise ConnectionLost(f"it sent nothing for {limit_s:g} s")
            select.select([self._socket], [], [], remaining_s)
        return frame

    def _frame(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ConnectionLost(f"it sent a frame of {length} bytes: at most {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        frame = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return frame

    def shutdown(self) -> None:
        """Ends the connection, which both ends see."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


class SocketWriter:
    """Writes records like a `RingWriter`."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._num_written = 0

    def has_room(self, record: Record) -> bool:
        return self._frames.has_room(len(record.data))

    def write(self, record: Record) -> None:
        """Raises ConnectionLost."""
        for part in encode_parts(record, self._num_written, PART_BYTES):
            self._frames.send(part)
            self._num_written += 1

    def stop(self) -> None:
        self._frames.shutdown()


class SocketReader:
    """Takes records like a `RingReader`."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._num_taken = 0
        self._assembly = Assembly(0)

    def take(self) -> Record | None:
        """Returns the next record, if all of it has come. Raises ConnectionLost;
        RingError for a gap.
        """
        while (frame := self._frames.take()) is not None:
            part = decode_part(frame, self._num_taken)
            self._num_taken += 1
            if (record := self._assembly.add(part)) is not None:
                return record
        return None


def _notice_lost_hosts(connection: socket.socket) -> None:
    """A host that no longer answers is noticed within about 4 s, also without a step."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
