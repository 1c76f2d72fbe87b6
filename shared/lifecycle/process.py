"""The lifecycle of a service process: one start, one drain, one stop.

A background task that raises also ends the process.

    starting ──start()──▶ ready ──SIGTERM or SIGINT──▶ draining ──drain()──▶ stop() ──▶ exit 0
                            │                             └──drain_timeout_s──┘
                            └─────────────── second signal ──────────────────▶ exit 1 at once
    starting ──SIGTERM or SIGINT──▶ stop(), at most START_STOP_S ──▶ exit 0
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

import structlog
import uvloop

from shared.background import TASK_FAILED, Background, start_awaited
from shared.clock import MonotonicClock, process_age_s
from shared.config import ProcessConfig
from shared.errors import HearthError
from shared.lifecycle.garbage import collect_garbage, freeze_heap
from shared.lifecycle.limits import forbid_core_dumps, raise_descriptor_limit
from shared.metrics.process_report import ProcessReport
from shared.metrics.supervisor_notifier import READY, STOPPING, Notifier
from shared.secrets.option_files import poll_files
from shared.telemetry.line_writer import replace_standard_streams
from shared.telemetry.log import configure_service_logging
from shared.tls import TlsFiles

log = structlog.get_logger(__name__)

HEARTH_ERROR_STATUS = 2
DEVICE_LOST_STATUS = 3  # a supervisor starts the process again, with growing pauses
START_STOP_S = 1.5  # time from a signal during the start to the exit


class Service(Protocol):
    async def start(self) -> None:
        """Returns once requests are served."""
        ...

    async def drain(self) -> None:
        """Leaves the fleet, rejects new work, and returns when the running work has ended."""
        ...

    async def stop(self) -> None:
        """Closes everything; called once, also after a failed or cancelled start."""
        ...

    def report(self) -> ProcessReport:
        """Reports the process's state now, for probes and metrics."""
        ...


def run_service(config: ProcessConfig, build: Callable[[], Awaitable[Service]]) -> int:
    """Runs a service until it stops. Returns the exit status: 0, or 2 after a HearthError, which is
    printed in one line.
    """
    replace_standard_streams()
    configure_service_logging(
        config.process_id, level=config.log_level, log_format=config.log_format
    )
    raise_descriptor_limit()
    forbid_core_dumps()
    try:
        uvloop.run(_live(config, build))
    except HearthError as error:
        print(f"{config.process_id}: {error.message}", file=sys.stderr, flush=True)
        return HEARTH_ERROR_STATUS
    return 0


async def _live(config: ProcessConfig, build: Callable[[], Awaitable[Service]]) -> None:
    drain_timeout_s, metrics = config.leave_timeout_s, config.metrics_address
    asyncio.get_running_loop().set_exception_handler(die)
    if metrics is not None:
        build = _reporting(build, *metrics, config.nats_tls)
    stopping = _on_signals()
    starting = start_awaited(_start(build))
    stopped = start_awaited(stopping.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await _abandon(starting)
    stopped.cancel()
    service, background = await starting, Background()
    try:
        freeze_heap()
        background.start_own(collect_garbage(MonotonicClock()))
        if files := config.secret_files:
            background.start_own(poll_files(files, MonotonicClock()))
        log.info("ready", after_s=round(process_age_s(), 2))
        notifier = Notifier.of_environ(os.environ)
        if notifier is not None:
            notifier.send(READY)
            background.start_own(notifier.report_progress(lambda: service.report().heartbeat))
        await stopping.wait()
        log.info("draining")
        if notifier is not None:
            notifier.send(STOPPING)
        async with asyncio.timeout(drain_timeout_s):
            await service.drain()
    except TimeoutError:
        log.warning("drain_interrupted", drain_timeout_s=drain_timeout_s)
    finally:
        await service.stop()
        await background.stop()
    log.info("stopped")


def _reporting(
    build: Callable[[], Awaitable[Service]], host: str, port: int, tls: TlsFiles
) -> Callable[[], Awaitable[Service]]:
    """Serves probes and metrics from before the build until the process exits. Raises ConfigError
    if the address cannot be had.
    """
    from shared.metrics.machine import MachineCollector  # not needed without metrics
    from shared.metrics.metrics_server import MetricsServer

    server = MetricsServer(host, port, MachineCollector(tls))
    built: list[Service] = []
    Background().start_own(server.follow(lambda: built[0].report() if built else None))
    server.start()
    log.info("metrics_listening", host=host, port=server.port)

    async def build_and_report() -> Service:
        service = await build()
        built.append(service)
        return service

    return build_and_report


async def _start(build: Callable[[], Awaitable[Service]]) -> Service:
    service = await build()
    try:
        await service.start()
    except BaseException:
        await service.stop()
        raise
    return service


async def _abandon(starting: asyncio.Task[Service]) -> NoReturn:
    """Ends the process before it joins. A thread that loads a model cannot be cancelled, so the
    process does not wait for its threads.
    """
    log.info("stopped_during_start")
    starting.cancel()
    await asyncio.wait({starting}, timeout=START_STOP_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exits if a background task raised: peers detect an exit sooner than a hang.

    Other errors, such as a client's lost connection, are only logged.
    """
    reason = context.get("message")
    log.error("unhandled", reason=reason, exc_info=context.get("exception"))
    if reason == TASK_FAILED:
        error = context.get("exception")
        os._exit(HEARTH_ERROR_STATUS if isinstance(error, HearthError) else 1)


def _on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)  # a second signal skips the drain
        stopping.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, on_signal)
    return stopping
