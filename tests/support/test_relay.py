"""The relay is as slow as the link that it stands for."""

from __future__ import annotations

import socket
import threading
import time

from tests.support.relay import SlowRelay

RATE, LATENCY_S = 10e6, 0.02
NUM_BYTES = 1_000_000


def echo(server: socket.socket) -> None:
    """Sends each first byte back, and one more after the rest."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(connection.recv(1))
        num_missing = NUM_BYTES
        while num_missing:
            num_missing -= len(connection.recv(1 << 16))
        connection.sendall(b".")


def test_relay_has_the_latency_and_the_rate_of_the_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with (
            SlowRelay(server.getsockname, bytes_per_s=RATE, latency_s=LATENCY_S) as relay,
            socket.create_connection(("127.0.0.1", relay.port)) as near,
        ):
            began_at = time.monotonic()
            near.sendall(b".")
            near.recv(1)
            round_trip_s = time.monotonic() - began_at
            near.sendall(bytes(NUM_BYTES))
            near.recv(1)
            transfer_s = time.monotonic() - began_at - round_trip_s
    assert round_trip_s >= 2 * LATENCY_S
    assert transfer_s >= 2 * LATENCY_S + NUM_BYTES / RATE
    assert relay.num_bytes == NUM_BYTES + 3
