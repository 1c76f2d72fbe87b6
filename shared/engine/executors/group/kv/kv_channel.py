"""Messages over a stream socket on an event loop: a length of four bytes, then msgpack."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class KvChannel(Generic[T]):
    """Construct with `open`. The other end is a process of the same worker, and is trusted."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(
        cls, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]
    ) -> KvChannel[T]:
        """Takes over the socket: to a process of this host, or of another one over TCP. `decoder`:
        of the messages that arrive.
        """
        connection.setblocking(False)
        if connection.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connection), decoder)
        return cls(*await asyncio.open_connection(sock=connection), decoder)

    def send(self, message: Any) -> None:
        """Sends a message. Does nothing if the other end is closed: `messages` ends, too."""
        data = self._encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def messages(self) -> AsyncIterator[T]:
        """Ends when the other process closes its end, or ends."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return

    def close(self) -> None:
        self._writer.close()
