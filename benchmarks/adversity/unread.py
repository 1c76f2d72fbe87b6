"""A process of clients that do not read: `python -m benchmarks.adversity.unread URL KEY …`.

Each connection has a small receive buffer and sends one request. Until there is a line on stdin, it
takes 4 KiB twice a second, so that the gateway keeps every response while the others are
generated; after that it takes none. The process ends when the gateway has closed all connections,
and prints how many.
"""

from __future__ import annotations

import contextlib
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
TAKE_S = 0.5  # at most 4 KiB each, of some 7 MB
PATIENCE_S = 240.0


def connect(url: str, api_key: str, *, stream: bool) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((parts.hostname, parts.port))
    request = unread(NUM_CHOICES, NUM_TOKENS, NUM_LOGPROBS, stream=stream)
    client.sendall(request.message(parts.netloc, api_key))
    client.setblocking(False)
    return client


class Clients:
    def __init__(self, clients: list[socket.socket]) -> None:
        self._open = {client.fileno(): client for client in clients}
        self._poll = select.poll()
        for descriptor in self._open:
            self._poll.register(descriptor, select.POLLRDHUP)  # not for bytes
        self._poll.register(sys.stdin, select.POLLIN)
        self._takes = True
        self.num_closed = 0

    def wait_until_closed(self) -> None:
        """Returns when the gateway has closed all connections, after `PATIENCE_S` at most."""
        taken_at = began = time.monotonic()
        while self._open and time.monotonic() - began < PATIENCE_S:
            for descriptor, _ in self._poll.poll(100):
                self._poll.unregister(descriptor)
                if descriptor == sys.stdin.fileno():
                    self._takes = False
                else:
                    self._open.pop(descriptor).close()
                    self.num_closed += 1
            if self._takes and time.monotonic() - taken_at > TAKE_S:
                self._take()
                taken_at = time.monotonic()

    def _take(self) -> None:
        for client in self._open.values():
            with contextlib.suppress(OSError):  # nothing to take, or closed: see above
                client.recv(RECEIVE_BYTES)


def main(url: str, *api_keys: str) -> None:
    keys = itertools.islice(itertools.cycle(api_keys), NUM_CONNECTIONS)
    clients = Clients([connect(url, key, stream=index % 2 == 0) for index, key in enumerate(keys)])
    clients.wait_until_closed()
    print(clients.num_closed)


if __name__ == "__main__":
    main(*sys.argv[1:])
