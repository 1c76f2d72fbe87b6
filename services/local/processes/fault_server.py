"""Kills and freezes workers of a local cluster at the request of its own gateway.

A killed worker is started again by the supervisor. A frozen one goes on after FREEZE_S, and when
the cluster stops.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from shared.background import Background, is_logged
from shared.clock import Clock
from shared.lifecycle.child_process import send_signal
from shared.lifecycle.faults import FREEZE_S, MAX_LINE_BYTES, FaultReply, FaultRequest
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

READ_TIMEOUT_S = 5.0
SOCKET_NAME = "faults.sock"


class FaultServer:
    """`process_of` returns the running process of a worker; only `worker_ids` are touched."""

    def __init__(
        self,
        directory: Path,
        worker_ids: Sequence[str],
        process_of: Callable[[str], Process],
        clock: Clock,
    ) -> None:
        self.path = directory / SOCKET_NAME
        self.token = secrets.token_urlsafe(32)
        self._worker_ids = tuple(worker_ids)
        self._process_of = process_of
        self._clock = clock
        self._frozen: set[Process] = set()
        self._background = Background()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE_BYTES)
        self.path.chmod(0o600)

    async def stop(self) -> None:
        """Thaws all workers, as a frozen process does not end at SIGTERM."""
        if self._server is not None:
            self._server.close()
        await self._background.stop()
        for process in list(self._frozen):
            self._thaw(process)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            writer.write(msgspec.json.encode(self._reply(line)) + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError):  # ValueError: the line is too long
            pass
        finally:
            writer.close()

    def _reply(self, line: bytes) -> FaultReply:
        try:
            request = msgspec.json.decode(line, type=FaultRequest)
        except UNREADABLE:
            return FaultReply(error="the request is not valid")
        if not hmac.compare_digest(request.token.encode(), self.token.encode()):
            return FaultReply(error="the token is not valid")
        error = "" if request.fault is None else self._inject(request)
        return FaultReply(worker_ids=self._worker_ids, error=error)

    def _inject(self, request: FaultRequest) -> str:
        """Returns an empty text, or why nothing was done."""
        worker_id = request.worker_id
        if worker_id not in self._worker_ids:
            return f"{worker_id!r} is no worker that this `hearth up` started"
        process = self._process_of(worker_id)
        if process.returncode is not None:
            return f"{worker_id} does not run at the moment"
        if request.fault == "kill":
            send_signal(process, signal.SIGKILL)
        elif process in self._frozen:
            return f"{worker_id} is frozen already"
        else:
            self._frozen.add(process)
            send_signal(process, signal.SIGSTOP)
            self._background.start_item(self._thaw_later(process), is_logged)
        log.warning("fault_injected", worker=worker_id, fault=request.fault)
        return ""

    async def _thaw_later(self, process: Process) -> None:
        await self._clock.sleep(FREEZE_S)
        self._thaw(process)

    def _thaw(self, process: Process) -> None:
        self._frozen.discard(process)
        send_signal(process, signal.SIGCONT)  # does nothing if this process has ended
