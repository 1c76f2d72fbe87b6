"""Probes a process at its own port, with the standard library alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping

TIMEOUT_S = 3.0
REQUEST = b"GET /healthz HTTP/1.0\r\n\r\n"
STATUS = b" 200 "


def is_alive(environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> bool | None:
    """Returns whether the event loop of this container's process runs; None without its port, which
    HEARTH_METRICS_PORT names.
    """
    port = environ.get("HEARTH_METRICS_PORT", "")
    if not port.isdigit() or port == "0":
        return None
    host = environ.get("HEARTH_METRICS_HOST") or "127.0.0.1"
    try:
        with socket.create_connection((_reachable(host), int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(REQUEST)
            head = connection.recv(64)
    except OSError:
        return False
    return STATUS in head.partition(b"\r\n")[0]


def _reachable(host: str) -> str:
    """Returns the address of this machine for a server that listens on all."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
