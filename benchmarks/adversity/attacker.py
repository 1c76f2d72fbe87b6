"""An attacker's process: `python -m benchmarks.adversity.attacker KIND URL KEY [CONNECTIONS]`.

Each line on stdin is a turn in seconds; 0 sends each request of the kind once. When all responses
of a turn have ended, one line on stdout has their number by status. The first body of each status
from 400 on goes to stderr. The process has the lowest priority: it shares a core with processes of
the cluster, which an attacker in reality does not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.adversity.attacks import KINDS

NUM_CONNECTIONS = 6
LAST_CHUNK = b"0\r\n\r\n"
RESET = "reset"
MAX_BODY_CHARS = 300


class Response(NamedTuple):
    """`status` is `RESET` if the connection ended before it. A chunked body is not retained."""

    status: str
    body: bytes = b""


class ErrorBodies:
    """Prints the first body of each status from 400 on: which limit rejected the request."""

    def __init__(self) -> None:
        self._statuses: set[str] = set()

    def take(self, response: Response) -> None:
        status = response.status
        if status == RESET or status < "400" or status in self._statuses:
            return
        self._statuses.add(status)
        text = response.body.decode(errors="replace")[:MAX_BODY_CHARS]
        print(f"first {status}: {text}", file=sys.stderr, flush=True)


class Client:
    """One connection, opened again after each end."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, message: bytes) -> Response:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            writer.write(message)
            response = await read_response(reader)
            await writer.drain()
        except (OSError, EOFError):
            self.close()
            return Response(RESET)
        return response

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Reads one response. Raises EOFError, OSError."""
    body = b""
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
        body = await reader.readexactly(int(length))
    return Response(head[9:12].decode(), body)


async def turn(
    clients: list[Client], messages: Iterator[bytes], seconds: float, errors: ErrorBodies
) -> Counter[str]:
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def attack(client: Client) -> None:
        for message in messages:
            response = await client.send(message)
            counts[response.status] += 1
            errors.take(response)
            if seconds and time.monotonic() >= until:
                return

    await asyncio.gather(*map(attack, clients))
    return counts


async def main(kind: str, url: str, api_key: str, num_connections: str = "") -> None:
    errors = ErrorBodies()
    clients = [Client(url) for _ in range(int(num_connections or NUM_CONNECTIONS))]
    host = urlsplit(url).netloc
    messages = [attack.message(host, api_key) for attack in KINDS[kind]()]
    endless = itertools.cycle(messages)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        seconds = float(line)
        counts = await turn(clients, endless if seconds else iter(messages), seconds, errors)
        print(msgspec.json.encode(counts).decode(), flush=True)


if __name__ == "__main__":
    os.nice(19)
    uvloop.run(main(*sys.argv[1:]))
