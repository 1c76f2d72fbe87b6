"""Someone on the path: records all bytes of a TCP connection, and may alter or insert some."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from shared.messages import DataPlaneAddress

# Called with the bytes that arrive; returns those to forward.
Alter = Callable[[bytes], bytes]


class RecordingRelay:
    def __init__(self, host: str, port: int) -> None:
        self.recorded = bytearray()  # of both directions
        self.to_receiver: Alter = bytes
        self.to_sender: Alter = bytes
        self._host, self._port = host, port

    async def accept(
        self, from_sender: asyncio.StreamReader, to_sender: asyncio.StreamWriter
    ) -> None:
        from_receiver, to_receiver = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(
            self._forward(from_sender, to_receiver, lambda data: self.to_receiver(data)),
            self._forward(from_receiver, to_sender, lambda data: self.to_sender(data)),
        )

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, alter: Alter
    ) -> None:
        with contextlib.suppress(OSError):  # either peer may close its connection
            while data := await reader.read(1 << 16):
                self.recorded += data
                writer.write(alter(data))
                await writer.drain()
        writer.close()


@asynccontextmanager
async def recording_relay(
    address: DataPlaneAddress, *, listens_on: tuple[str, int] = ("127.0.0.1", 0)
) -> AsyncIterator[tuple[RecordingRelay, DataPlaneAddress]]:
    """The relay, and its address without a unix socket, as of a receiver on another host."""
    relay = RecordingRelay("127.0.0.1", address.port)
    listener = await asyncio.start_server(relay.accept, *listens_on)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield relay, msgspec.structs.replace(address, port=port, unix_path="")
    finally:
        listener.close()
