"""M1: 200 clients of 20 tenants request large responses, half of them streams, and read nothing.

RSS is that of the gateway's main process, its largest from before the requests until all clients
are gone: a stream's client is gone 30 s after the kernel took its last byte, while other responses
may still be generated. The time until all are gone begins when the last response has ended. A
connection is gone when the gateway holds it no longer.

The clients are a process of their own: `python -m benchmarks.adversity.slow_clients URL KEY …`.
Their receive buffers are small, and each sends one request.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.adversity.attacks import unread
from benchmarks.adversity.turns import started
from benchmarks.report import Bar, at_least, at_most
from tests.support.cluster.service_processes import ROOT

NUM_TENANTS = 20
NUM_CONNECTIONS = 200
NUM_CHOICES = 16
NUM_TOKENS = 400
NUM_LOGPROBS = 20
RECEIVE_BYTES = 4096
MAX_RSS_MIB = 384
MAX_GONE_S = 35.0
SAMPLE_S = 0.1
MAX_S = 300.0
MIB = 1 << 20
ENDED = "hearth_requests_total{"


async def measure(rows: Sequence[str]) -> list[Bar]:
    async with started() as run:
        keys = [await run.new_key(f"slow-{number}") for number in range(NUM_TENANTS)]
        return await _measure(run.target.url, keys, run.gateway)


async def _measure(url: str, keys: list[str], gateway: psutil.Process) -> list[Bar]:
    idle = gateway.memory_info().rss
    clients = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.adversity.slow_clients",
        url,
        *keys,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        seen = await _watched(url, gateway, clients)
    finally:
        clients.kill()
        await clients.wait()
    return [
        at_least("M1: requests of clients that do not read", seen.num_ended, NUM_CONNECTIONS, ""),
        at_most("M1: gateway's RSS above idle", (seen.rss - idle) / MIB, MAX_RSS_MIB, "MiB"),
        at_most("M1: all gone after", seen.gone_at - seen.ended_at, MAX_GONE_S, "s"),
    ]


@dataclass
class Seen:
    """The largest RSS in bytes, and times in seconds."""

    rss: int = 0
    num_ended: int = 0  # requests
    ended_at: float = 0.0
    gone_at: float = 0.0


async def _watched(url: str, gateway: psutil.Process, clients: Process) -> Seen:
    """Returns when all clients are gone. Raises TimeoutError after `MAX_S`."""
    assert clients.stdout is not None, "a pipe"
    seen, port = Seen(), urlsplit(url).port
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http, asyncio.timeout(MAX_S):
        before = _total((await http.get(f"{url}/metrics")).text, ENDED)
        num_own = _num_connections(gateway, port)
        await clients.stdout.readline()
        while not seen.gone_at:
            seen.rss = max(seen.rss, gateway.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)
            if not seen.ended_at:
                metrics = (await http.get(f"{url}/metrics")).text
                seen.num_ended = round(_total(metrics, ENDED) - before)
                seen.ended_at = time.monotonic() if seen.num_ended >= NUM_CONNECTIONS else 0.0
            elif _num_connections(gateway, port) <= num_own:
                seen.gone_at = time.monotonic()
    return seen


def _num_connections(gateway: psutil.Process, port: int | None) -> int:
    connections = gateway.net_connections("tcp")
    return sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in connections)


def _total(metrics: str, name: str) -> float:
    """Returns the sum over a metric's labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


# ── the clients' process ─────────────────────────────────────────────────────────────────────────


def connect(url: str, api_key: str, *, stream: bool) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((parts.hostname, parts.port))
    request = unread(NUM_CHOICES, NUM_TOKENS, NUM_LOGPROBS, stream=stream)
    client.sendall(request.message(parts.netloc, api_key))
    return client


def request_and_wait(url: str, *api_keys: str) -> None:
    """Returns with a line on stdin. Prints the number of connections once all are open."""
    keys = itertools.islice(itertools.cycle(api_keys), NUM_CONNECTIONS)
    clients = [connect(url, key, stream=index % 2 == 0) for index, key in enumerate(keys)]
    print(len(clients), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    request_and_wait(*sys.argv[1:])
