"""Probes and metrics of one process, over real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import httpx
import pytest

from shared.errors import ConfigError
from shared.messages import Heartbeat, ProcessState
from shared.metrics.metrics_server import MetricsServer
from shared.metrics.process_report import ProcessReport
from tests.support.waiting import LIMIT_S

WAIT_S = LIMIT_S


def report(state: ProcessState) -> ProcessReport:
    heartbeat = Heartbeat(
        process_id="decode-1",
        epoch=1,
        sequence_number=1,
        roles=("decode",),
        state=state,
        interval_s=0.25,
    )
    return ProcessReport(heartbeat, takes_work=state == "ready")


class Process:
    def __init__(self, stall_limit_s: float) -> None:
        self.report: ProcessReport | None = None
        self.server = MetricsServer("127.0.0.1", 0, stall_limit_s=stall_limit_s)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.server.port}", trust_env=False, timeout=WAIT_S
        )

    def get(self, path: str) -> tuple[int, str]:
        """Blocks the event loop, which the server's thread does not need."""
        response = self.http.get(path)
        return response.status_code, response.text.strip()

    async def until(self, path: str, *expected: object) -> None:
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(self.get, path) != expected:
                pass


@asynccontextmanager
async def running(stall_limit_s: float = 60.0) -> AsyncIterator[Process]:
    process = Process(stall_limit_s)
    process.server.start()
    following = asyncio.create_task(process.server.follow(lambda: process.report))
    try:
        yield process
    finally:
        following.cancel()
        process.http.close()
        await asyncio.to_thread(process.server.stop)


def block_until(is_met: Callable[[], bool]) -> None:
    end = monotonic() + WAIT_S
    while not is_met():
        assert monotonic() < end


async def test_ready_follows_the_state_of_the_process() -> None:
    async with running() as process:
        await process.until("/ready", 503, "not ready: starting")
        states: tuple[ProcessState, ...] = ("starting", "ready", "standby", "draining", "stopped")
        for state in states:
            process.report = report(state)
            expected = (200, "ready") if state == "ready" else (503, f"not ready: {state}")
            await process.until("/ready", *expected)
            assert process.get("/healthz") == (200, "ok")
        status, text = process.get("/metrics")
        assert status == 200
        assert 'hearth_process_ready{process="decode-1",role="decode"} 0.0' in text
        assert process.get("/other")[0] == 404


async def test_probes_answer_while_the_event_loop_hangs() -> None:
    async with running(stall_limit_s=0.2) as process:
        process.report = report("ready")
        await process.until("/ready", 200, "ready")
        block_until(lambda: process.get("/healthz") == (503, "stalled"))
        assert process.get("/ready")[0] == 503
        text = process.get("/metrics")[1]
        assert 'hearth_process_live{process="decode-1",role="decode"} 0.0' in text
        assert "hearth_event_loop_stall_seconds" in text
        await process.until("/healthz", 200, "ok")


async def test_client_that_sends_nothing_holds_up_no_other() -> None:
    async with running() as process:
        with socket.create_connection(("127.0.0.1", process.server.port)) as idle:
            idle.setblocking(False)
            assert process.get("/healthz") == (200, "ok")
            with pytest.raises(BlockingIOError):  # the server has not closed it
                idle.recv(1)


def test_address_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            MetricsServer("127.0.0.1", port)
    assert caught.value.message == (
        f"metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
