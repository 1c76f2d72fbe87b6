"""An attacker's process: `python -m benchmarks.adversity.attacker KIND URL KEY [CONNECTIONS]`.

Each line on stdin is a turn in seconds; 0 sends each request of the kind once. When all responses
of a turn have ended, one line on stdout has their number by status. The process has the lowest
priority: it shares a core with processes of the cluster, which an attacker in reality does not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.adversity.attacks import KINDS

NUM_CONNECTIONS = 6
LAST_CHUNK = b"0\r\n\r\n"
RESET = "reset"


class Client:
    """One connection, opened again after each end."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, message: bytes) -> str:
        """Returns the status of the response, or `RESET` if the connection ended before it."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            writer.write(message)
            status = await read_response(reader)
            await writer.drain()
        except (OSError, EOFError):
            self.close()
            return RESET
        return status

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def read_response(reader: asyncio.StreamReader) -> str:
    """Reads one response; of a chunked one only its end. Raises EOFError, OSError."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"\r\ntransfer-encoding: chunked" in head:
        tail = b""
        while not tail.endswith(LAST_CHUNK):
            data = await reader.read(1 << 16)
            if not data:
                raise EOFError
            tail = (tail + data)[-len(LAST_CHUNK) :]
    else:
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    return head[9:12].decode()


async def turn(clients: list[Client], messages: Iterator[bytes], seconds: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def attack(client: Client) -> None:
        for message in messages:
            counts[await client.send(message)] += 1
            if seconds and time.monotonic() >= until:
                return

    await asyncio.gather(*map(attack, clients))
    return counts


async def main(kind: str, url: str, api_key: str, num_connections: str = "") -> None:
    clients = [Client(url) for _ in range(int(num_connections or NUM_CONNECTIONS))]
    host = urlsplit(url).netloc
    messages = [attack.message(host, api_key) for attack in KINDS[kind]()]
    endless = itertools.cycle(messages)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        seconds = float(line)
        counts = await turn(clients, endless if seconds else iter(messages), seconds)
        print(msgspec.json.encode(counts).decode(), flush=True)


if __name__ == "__main__":
    os.nice(19)
    uvloop.run(main(*sys.argv[1:]))
