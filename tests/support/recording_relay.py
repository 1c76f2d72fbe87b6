"""Someone on the path: records all bytes of TCP connections, and may alter or insert some."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from shared.messages import DataPlaneAddress

# Called with the bytes that arrive; returns those to forward.
Alter = Callable[[bytes], bytes]


class RecordingRelay:
    def __init__(self, host: str, port: int) -> None:
        self.to_receiver: Alter = bytes
        self.to_sender: Alter = bytes
        self._host, self._port = host, port
        self._streams: list[bytearray] = []  # the bytes of each direction of a connection

    @property
    def recorded(self) -> bytes:
        """All connections, one direction after the other: a message is never interrupted."""
        return b"".join(self._streams)

    def mark(self) -> list[int]:
        """Returns how much of each direction has been recorded so far."""
        return list(map(len, self._streams))

    def since(self, mark: list[int]) -> bytes:
        """Returns what has been recorded after a mark."""
        starts = mark + [0] * (len(self._streams) - len(mark))
        return b"".join(stream[start:] for stream, start in zip(self._streams, starts, strict=True))

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
        stream = bytearray()
        self._streams.append(stream)
        with contextlib.suppress(OSError):  # either peer may close its connection
            while data := await reader.read(1 << 16):
                stream += data
                writer.write(alter(data))
                await writer.drain()
        writer.close()


@asynccontextmanager
async def relay_to(
    port: int, *, listens_on: tuple[str, int] = ("127.0.0.1", 0), tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[RecordingRelay, int]]:
    """A relay to a server on this host, and the relay's port. With `tls` the clients' TLS ends
    here, as at a proxy.
    """
    relay = RecordingRelay("127.0.0.1", port)
    listener = await asyncio.start_server(relay.accept, *listens_on, ssl=tls)
    try:
        yield relay, listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@asynccontextmanager
async def recording_relay(
    address: DataPlaneAddress, *, listens_on: tuple[str, int] = ("127.0.0.1", 0)
) -> AsyncIterator[tuple[RecordingRelay, DataPlaneAddress]]:
    """The relay, and its address without a unix socket, as of a receiver on another host."""
    async with relay_to(address.port, listens_on=listens_on) as (relay, port):
        yield relay, msgspec.structs.replace(address, port=port, unix_path="")
