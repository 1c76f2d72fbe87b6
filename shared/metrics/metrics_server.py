"""A process's probes and metrics over HTTP, on a thread that answers while the event loop hangs.

    /healthz  200: the event loop ran within STALL_LIMIT_S; else 503
    /ready    200: the process would take work now; else 503
    /metrics  the metrics of this process alone

The event loop reports every TICK_S; the thread reads only the last report.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from threading import Thread
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import ConfigError
from shared.metrics.families.fleet import FleetCollector
from shared.metrics.families.member import Member
from shared.metrics.process_report import ProcessReport

TICK_S = 0.25
STALL_LIMIT_S = 5.0
REQUEST_TIMEOUT_S = 5.0  # limit of a client that sends or reads nothing

StartResponse = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Probes are no events."""


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection: one that says nothing holds up no other."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without a name lookup, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _ServerV6(_ThreadedServer):
    address_family = socket.AF_INET6


class _LoopCollector(Collector):
    def __init__(self, stall_s: Callable[[], float]) -> None:
        self._stall_s = stall_s

    def collect(self) -> Iterator[Metric]:
        text = "Time since the event loop of this process ran last."
        yield GaugeMetricFamily("hearth_event_loop_stall_seconds", text, self._stall_s())


class MetricsServer:
    def __init__(
        self,
        host: str,
        port: int,
        machine: Collector | None = None,
        *,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """Binds; port 0 is a free one. Raises ConfigError if the address cannot be had."""
        self._report: ProcessReport | None = None
        self._stall_limit_s = stall_limit_s
        self._ticked_at = monotonic()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(FleetCollector(self._members))
        registry.register(_LoopCollector(self._stall_s))
        registry.register(_OwnCollector(lambda: self._report))
        if machine is not None:
            registry.register(machine)
        self._metrics = make_wsgi_app(registry)
        kind = _ServerV6 if ":" in host else _ThreadedServer
        try:
            self._server = kind((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {reason}") from None
        self._server.set_app(self._respond)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    async def follow(self, report: Callable[[], ProcessReport | None]) -> None:
        """Runs on the process's event loop. `report` returns None before the process is built."""
        while True:
            self._report = report()
            self._ticked_at = monotonic()
            await asyncio.sleep(min(TICK_S, self._stall_limit_s / 4))

    def _stall_s(self) -> float:
        return monotonic() - self._ticked_at

    def _members(self) -> Iterable[Member]:
        report = self._report
        is_live = self._stall_s() < self._stall_limit_s
        return () if report is None else (Member(report.heartbeat, is_live),)

    def _respond(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        report, is_alive = self._report, self._stall_s() < self._stall_limit_s
        match environ.get("PATH_INFO"):
            case "/healthz":
                return _text(start_response, "ok" if is_alive else "stalled", is_ok=is_alive)
            case "/ready":
                takes_work = report is not None and report.takes_work and is_alive
                state = "starting" if report is None else report.heartbeat.state
                word = "ready" if takes_work else f"not ready: {state}"
                return _text(start_response, word, is_ok=takes_work)
            case "/metrics":
                return self._metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/healthz, /ready, /metrics\n"]


class _OwnCollector(Collector):
    def __init__(self, report: Callable[[], ProcessReport | None]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        return () if report is None or report.own is None else report.own.collect()


def _text(start_response: StartResponse, text: str, *, is_ok: bool) -> Iterable[bytes]:
    status = "200 OK" if is_ok else "503 Service Unavailable"
    start_response(status, [("Content-Type", "text/plain"), ("Cache-Control", "no-store")])
    return [text.encode() + b"\n"]
