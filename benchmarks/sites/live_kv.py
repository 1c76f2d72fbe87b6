"""The KV of two regions on one bus, over the link between them.

A token has 16 bytes of KV here, and 128 KiB on the stated device, so the link carries that many
fewer bytes a second. Workers of one region push to each other at once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks.serving.cluster import Process
from shared.engine.executors.timing_executor import STATE_BYTES
from tests.support.relay import LOCALHOST, SlowRelay

KV_BYTES = 128 * 1024  # of a token


class KvRelay(SlowRelay):
    """Relays the data plane of a decode worker, at once for the workers `near`."""

    def __init__(
        self, port: int, host: str, near: Iterable[Process], *, latency_s: float, bytes_per_s: float
    ) -> None:
        self._near = [psutil.Process(each.popen.pid) for each in near]
        super().__init__(
            lambda: (LOCALHOST, port),
            latency_s=latency_s,
            bytes_per_s=bytes_per_s * STATE_BYTES / KV_BYTES,
            host=host,
            port=port,
        )

    def is_delayed(self, connection: socket.socket) -> bool:
        _, port = connection.getpeername()
        found = (each for process in self._near for each in process.net_connections("tcp"))
        return all(each.laddr.port != port for each in found)


def relayed(
    worker: Process, folder: Path, host: str, near: Iterable[Process], **link: float
) -> KvRelay:
    """Relays what a decode worker listens to. Its unix socket, in `folder`, is removed: peers try
    that first.
    """
    for socket_path in folder.rglob("kv.sock"):
        socket_path.unlink()
    listening = psutil.Process(worker.popen.pid).net_connections("tcp")
    (port,) = (each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN)
    return KvRelay(port, host, near, **link)
