"""Restarts processes that end, and stops all in reverse order.

starting ──serve()──▶ serving ──stop()──▶ stopping ──▶ stopped
    └──a process ends──▶ `failure` is set

While serving, a process that ends is reported, logged and restarted after a growing pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

from services.local.processes.child_processes import (
    Child,
    ProcessSpec,
    kill_children,
    start_child,
    stop_children,
)
from services.local.processes.log_files import bound_logs_while_running
from services.local.processes.supervision_log import RESTARTING, SupervisionLog
from shared.background import item_error, start_awaited
from shared.clock import Clock
from shared.errors import DependencyUnavailable, HearthError

log = structlog.get_logger(__name__)

POLL_S = 0.02
LISTEN_TIMEOUT_S = 10.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0

Event = Literal["started", "waiting", "ready", "ended", "restarting"]
Report = Callable[[str, Event, str], None]  # process id, event, details


class ProcessEnded(HearthError):
    code = "process_ended"


class Supervisor:
    def __init__(self, clock: Clock, directory: Path, logs: Path, report: Report) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._directory = directory
        self._logs = logs
        self._log = SupervisionLog(logs)
        self._display = report
        self._is_serving = False
        self._children: dict[str, Child] = {}
        self._supervisions: list[asyncio.Task[None]] = []

    def pid_of(self, process_id: str) -> int:
        return self._children[process_id].process.pid

    def process_of(self, process_id: str) -> asyncio.subprocess.Process:
        """Returns the last process with this id."""
        return self._children[process_id].process

    async def launch(self, spec: ProcessSpec) -> None:
        """Starts a process and waits for its port, if it has one.

        Once started, an end of the process sets `failure` or, while serving, restarts the process.
        """
        await self._start(spec)
        self._supervisions.append(start_awaited(self._supervise(spec)))
        await self._wait_until_up(spec)

    def serve(self) -> None:
        """Begins to restart processes that end, and to bound the logs."""
        self._is_serving = True
        self._log.write("cluster_ready", level="info")
        bounding = bound_logs_while_running(self._logs, self._clock, self._logs_in_use)
        self._supervisions.append(start_awaited(bounding))

    def _logs_in_use(self) -> list[Path]:
        return [self._log.path, *(each.log_path for each in self._children.values())]

    async def stop(self, *, grace_s: float) -> None:
        """Sends SIGTERM in reverse order, and SIGKILL to the rest of a group after `grace_s`."""
        await self._stop_supervising()
        orders = {child.spec.start_order for child in self._children.values()}
        for order in sorted(orders, reverse=True):
            group = [each for each in self._children.values() if each.spec.start_order == order]
            await stop_children(group, grace_s=grace_s)

    async def abandon(self, *, grace_s: float) -> None:
        """Stops all services at once, as the cluster has not served yet, then NATS and Redis: a
        service that loses them first logs that, and not why the start failed.
        """
        await self._stop_supervising()
        services = [each for each in self._children.values() if each.spec.start_order]
        await stop_children(services, grace_s=grace_s)
        await stop_children(self._children.values(), grace_s=grace_s)

    async def _stop_supervising(self) -> None:
        for each in self._supervisions:
            each.cancel()
        await asyncio.gather(*self._supervisions, return_exceptions=True)
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio does not warn

    def kill(self) -> None:
        """Kills all processes, which ends a running `stop` early."""
        kill_children(self._children.values())

    async def _start(self, spec: ProcessSpec) -> None:
        self._children[spec.process_id] = await start_child(spec, self._directory, self._logs)
        self._report(spec.process_id, "started", "")

    async def _wait_until_up(self, spec: ProcessSpec) -> None:
        if spec.listens_on is not None:
            await self._wait_for_port(*spec.listens_on)
            self._report(spec.process_id, "ready", "")

    async def _supervise(self, spec: ProcessSpec) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            child, started = self._children[spec.process_id], self._clock.now()
            await child.process.wait()
            if not self._is_serving:
                end = child.end(" during startup")
                self._log.write("process_ended", level="error", child=spec.process_id, how=end)
                self._fail(f"{spec.process_id} {end}; its log: {child.log_path}")
                return
            end = child.end()
            self._log.write("process_ended", child=spec.process_id, how=end)
            self._report(spec.process_id, "ended", end)
            lived_s = self._clock.now() - started
            pause_s = MIN_PAUSE_S if lived_s > MAX_PAUSE_S else min(MAX_PAUSE_S, 2 * pause_s)
            await self._clock.sleep(pause_s)
            self._log.write(RESTARTING, child=spec.process_id)
            self._report(spec.process_id, "restarting", "")
            await self._restart(spec)

    async def _restart(self, spec: ProcessSpec) -> None:
        """Restarts a process. A failure is tried again: `_supervise` finds the last
        process ended.
        """
        try:
            await self._start(spec)
            await self._wait_until_up(spec)
        except HearthError:
            pass  # the end of the process is reported
        except BaseException as raised:  # such as a lack of descriptors or memory
            item_error(raised)
            log.exception("not_restarted", process=spec.process_id)

    def _report(self, process_id: str, event: Event, details: str) -> None:
        with contextlib.suppress(Exception):  # a display that fails must not end a supervision
            self._display(process_id, event, details)

    def _fail(self, message: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(ProcessEnded(message))

    async def _wait_for_port(self, host: str, port: int) -> None:
        deadline = self._clock.now() + LISTEN_TIMEOUT_S
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                if self._clock.now() > deadline:
                    raise DependencyUnavailable(f"nothing listens on {host}:{port}") from None
                await self._clock.sleep(POLL_S)
            else:
                writer.close()
                return
