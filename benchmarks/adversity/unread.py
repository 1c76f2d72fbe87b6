"""Clients that do not read: `python -m benchmarks.adversity.unread URL KEY …`, a process of its own.

Each connection has a small receive buffer, sends one request and reads nothing. The process ends
when the gateway has closed all of them, and prints how many.
"""

from __future__ import annotations

import itertools
import select
import socket
import sys
import time
from urllib.parse import urlsplit

from benchmarks.adversity.attacks import unread

NUM_CONNECTIONS = 200
NUM_CHOICES = 16
NUM_TOKENS = 400
NUM_LOGPROBS = 20
RECEIVE_BYTES = 4096
PATIENCE_S = 240.0


def connect(url: str, api_key: str, *, stream: bool) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((parts.hostname, parts.port))
    request = unread(NUM_CHOICES, NUM_TOKENS, NUM_LOGPROBS, stream=stream)
    client.sendall(request.message(parts.netloc, api_key))
    return client


def wait_until_closed(clients: list[socket.socket]) -> int:
    """Returns the number of connections that the gateway has closed, after `PATIENCE_S` at most.

    Without events to wait for, only errors and ends are reported: bytes stay unread.
    """
    poll, num_closed = select.poll(), 0
    for client in clients:
        poll.register(client, 0)
    until = time.monotonic() + PATIENCE_S
    while num_closed < len(clients) and time.monotonic() < until:
        for descriptor, _ in poll.poll(1000):
            poll.unregister(descriptor)
            num_closed += 1
    return num_closed


def main(url: str, *api_keys: str) -> None:
    keys = itertools.islice(itertools.cycle(api_keys), NUM_CONNECTIONS)
    clients = [connect(url, key, stream=index % 2 == 0) for index, key in enumerate(keys)]
    print(wait_until_closed(clients))


if __name__ == "__main__":
    main(*sys.argv[1:])
