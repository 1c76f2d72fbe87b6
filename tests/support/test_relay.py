"""The relay is as slow as the link that it stands for."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.support.relay import LinkRelay, SlowRelay

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


def test_link_refuses_while_it_is_cut_and_passes_nothing_while_it_is_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = LinkRelay(server.getsockname()[1])
        near, far = connected(link, server)
        link.hold(back=False)
        near.sendall(b"there")
        far.sendall(b"back")
        assert near.recv(8) == b"back"
        far.settimeout(0.05)
        with pytest.raises(TimeoutError):
            far.recv(8)
        far.settimeout(5.0)
        link.open()
        assert far.recv(8) == b"there"
        link.cut()
        assert near.recv(8) == far.recv(8) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", link.port))
        link.open()
        for each in connected(link, server):
            each.close()
        link.close()


def connected(link: LinkRelay, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", link.port))
    return near, server.accept()[0]
