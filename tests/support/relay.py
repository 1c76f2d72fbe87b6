"""A TCP relay that delays each direction, as a server far away."""

from __future__ import annotations

import asyncio
from contextlib import suppress

CHUNK_BYTES = 65_536


class DelayingRelay:
    """Use as `async with DelayingRelay(port, one_way_s=0.04) as relay`, then dial `relay.port`."""

    def __init__(
        self, target_port: int, *, one_way_s: float, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """`host` and `port`: its own address; 0: a free port."""
        self.one_way_s = one_way_s
        self.host = host
        self.port = port
        self._target_port = target_port
        self._writers: list[asyncio.StreamWriter] = []
        self._relaying: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> DelayingRelay:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._relaying:
            task.cancel()
        await asyncio.gather(*self._relaying, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relaying.append(asyncio.create_task(self._relay(reader, writer)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accepts at once, so only the bytes of a connection are delayed."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                loop.call_later(self.one_way_s, _write, writer, data)
        loop.call_later(self.one_way_s, writer.close)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
