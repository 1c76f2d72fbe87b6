"""`hearth trace` against gateways on a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import pytest_asyncio
from rich.console import Console

from services.cli.trace.timeline_table import bar, timeline_parts
from shared.clock import MonotonicClock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import ReadTimeline, TimelineRead
from shared.randomness import SystemRandomness
from shared.subjects import trace
from shared.telemetry.timeline import Phase, Timeline, Try
from shared.transport.bus import NatsBus
from tests.services.cli.in_process import call_hearth
from tests.support.servers import NatsServer

TIMELINE = Timeline(
    request_id="r-1",
    tenant_id="t",
    gateway_id="gateway-1",
    model="tiny",
    outcome="stop",
    started_at=0.0,
    duration_s=1.0,
    ttft_s=0.5,
    num_late_masks=3,
    tries=(
        Try(
            number=1,
            worker_id="decode-1",
            prefill_worker_id="prefill-1",
            outcome="finished",
            phases=(
                Phase(
                    name="kv_push",
                    process_id="prefill-1",
                    start_s=0.0,
                    duration_s=0.5,
                    num_bytes=3 << 20,
                    num_tokens=1,
                    port="memfd (same host)",
                    num_copies=4,
                    predicted_s=0.0125,
                ),
                Phase(
                    name="decode",
                    process_id="decode-1",
                    start_s=0.5,
                    duration_s=0.5,
                    num_tokens=30,
                    num_steps=31,
                ),
            ),
        ),
    ),
)


@dataclass
class Gateways:
    """`silent`: the bus of the one that answers no question."""

    server: NatsServer
    silent: NatsBus


@pytest_asyncio.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Gateways]:
    """One gateway knows r-1, the other one is silent."""
    names = ("gateway-1", "gateway-2")
    users = (
        ("observer", "observer-1"),
        ("client", "client-1"),
        *(("gateway", name) for name in names),
    )
    server = NatsServer(tmp_path, users)  # type: ignore[arg-type]
    monitors = []
    for name in names:
        bus = await NatsBus.connect(server.url(name), process_id=name)
        monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("gateway",))
        await monitor.start()
        monitors.append((monitor, bus))
        if name == "gateway-1":
            await bus.serve(trace(name), ReadTimeline, _read)
            await bus.flush()
    yield Gateways(server, monitors[1][1])
    for monitor, bus in monitors:
        await monitor.stop()
        await bus.close()
    server.stop()


def _read(question: ReadTimeline) -> TimelineRead:
    return TimelineRead(timeline=TIMELINE if question.request_id == "r-1" else None)


async def run(
    gateways: Gateways, *arguments: str, credential: str = "observer-1"
) -> CompletedProcess[str]:
    environ = {"HEARTH_NATS_URL": gateways.server.url(credential)}
    return await asyncio.to_thread(call_hearth, ("trace", *arguments), environ)


async def test_trace_prints_the_timeline(gateways: Gateways) -> None:
    found = await run(gateways, "r-1", "--json")
    assert found.returncode == 0, found.stderr
    lines = (found.stdout + found.stderr).splitlines()
    assert "no reply within 1 s: gateway-2" in lines
    printed = next(line for line in lines if line.startswith("{"))
    assert json.loads(printed)["tries"][0]["worker_id"] == "decode-1"
    await gateways.silent.serve(trace("gateway-2"), ReadTimeline, _read)
    await gateways.silent.flush()
    found = await run(gateways, "r-2")
    assert found.returncode == 1
    assert "no gateway knows the request 'r-2'" in found.stdout + found.stderr


@pytest.mark.parametrize("credential", ["gateway-2", "client-1"])
async def test_credential_without_permission_is_named(gateways: Gateways, credential: str) -> None:
    found = await run(gateways, "r-1", credential=credential)
    assert found.returncode == 2
    assert f"credential {credential} may not read timelines: use one of an obs" in found.stderr
    assert "no reply" not in found.stderr


def test_table_has_workers_bytes_and_late_masks() -> None:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        for part in timeline_parts(TIMELINE, 80):
            console.print(part)
    text = capture.get()
    for expected in (
        "0 resubmissions, 3 late masks",
        "3.0 MiB, 1 token ",
        "kv_push: over memfd (same host), 4 copies of each byte, predicted 12.5 ms",
        "30 tokens, 31 steps",
        "try 1: decode-1, prefill prefill-1",
    ):
        assert expected in " ".join(text.split())
    assert "…" not in text  # nothing is cut at 80 cells


def test_bars_are_aligned() -> None:
    assert bar(0.5, 0.5, 1.0, 40) == " " * 20 + "█" * 20
    assert bar(1.0, 0.0, 1.0, 40) == " " * 39 + "█"
