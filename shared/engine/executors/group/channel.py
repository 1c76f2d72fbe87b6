"""Messages over a stream socket: a length of four bytes, then msgpack. Blocking."""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other process has ended, or closed the channel."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def of(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: Any) -> None:
        """Sends a message. Raises ChannelClosed."""
        data = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, kind: type[T] | Any, timeout_s: float | None = None) -> T:
        """Receives a message. Raises ChannelClosed, TimeoutError after `timeout_s` without a byte,
        and msgspec.DecodeError for what is no `kind`.
        """
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
        found: T = msgspec.msgpack.decode(self._read(length), type=kind)
        self._socket.settimeout(None)
        return found

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, start = memoryview(data), 0
        while start < count:
            try:
                received = self._socket.recv_into(view[start:])
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not received:
                raise ChannelClosed("the other process has ended")
            start += received
        return data
