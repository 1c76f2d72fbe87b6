"""A process of clients that do not read: `python -m benchmarks.adversity.unread URL KEY …`.

Each connection has a small receive buffer, sends one request, and takes no byte of the response.
The process ends with a line on stdin.
"""

from __future__ import annotations

import itertools
import socket
import sys
from urllib.parse import urlsplit

from benchmarks.adversity.attacks import unread

NUM_CONNECTIONS = 200
NUM_CHOICES = 16
NUM_TOKENS = 400
NUM_LOGPROBS = 20
RECEIVE_BYTES = 4096


def connect(url: str, api_key: str, *, stream: bool) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((parts.hostname, parts.port))
    request = unread(NUM_CHOICES, NUM_TOKENS, NUM_LOGPROBS, stream=stream)
    client.sendall(request.message(parts.netloc, api_key))
    return client


def main(url: str, *api_keys: str) -> None:
    keys = itertools.islice(itertools.cycle(api_keys), NUM_CONNECTIONS)
    clients = [connect(url, key, stream=index % 2 == 0) for index, key in enumerate(keys)]
    print(len(clients), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
