"""`hearth status --once`: by a gateway's answer, with a late heartbeat and without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.cli.fleet import status as module
from services.cli.fleet.status import _status
from shared.clock import MonotonicClock
from shared.errors import DependencyUnavailable
from shared.fleet.fleet_view import ProcessView
from shared.fleet.host_view import HostView
from shared.fleet.read_fleet import FleetRead, ReadFleet, ServerView
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import HostModelPage, ListHostModels, RoleDemand
from shared.randomness import SystemRandomness
from shared.subjects import READ_FLEET, fleet, list_host_models
from shared.transport.bus import NatsBus
from tests.services.cli.cluster.heartbeats import hosted
from tests.services.cli.in_process import call_hearth
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S

FIRST_POLL_S = 0.05
ONCE = {"is_once": True, "is_json": True, "interval_s": 1.0, "first_poll_s": FIRST_POLL_S}
UNREACHABLE = "nats://o:word@127.0.0.1:9"
USERS = (
    ("observer", "observer-1"),
    ("gateway", "gateway-1"),
    ("gateway", "gateway-2"),
    ("host", "host-1"),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, USERS)
    yield server
    server.stop()


async def test_status_waits_for_a_heartbeat(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("observer-1")
    with pytest.raises(DependencyUnavailable) as silent:
        await _status(url, **ONCE, first_beat_s=2 * FIRST_POLL_S)
    address = f"nats://127.0.0.1:{server.port}"
    assert silent.value.message == f"no heartbeat at {address} within {2 * FIRST_POLL_S:g} s"
    assert "{" not in capsys.readouterr().out  # in this process, the bus logs
    late = asyncio.create_task(_status(url, **ONCE))
    done, _ = await asyncio.wait({late}, timeout=4 * FIRST_POLL_S)
    assert not done
    bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
    health_monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    await health_monitor.start()
    try:
        await late
    finally:
        await health_monitor.stop()
        await bus.close()
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("{"))
    services = json.loads(line)["services"]
    assert [row["process_id"] for row in services] == ["gateway-1"]


async def test_gateway_is_asked_so_that_nothing_waits(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process sends a heartbeat here. The gateway that answers first is not the oldest one."""
    uptimes = {"gateway-1": 0.5, "gateway-2": 9.0}
    models = HostModelPage(version=1, num_models=1, models=(hosted("big", "r1", "hot"),))
    async with AsyncExitStack() as stack:

        async def serve(name: str, subject: str, kind: Any, answer: Callable[[], Any]) -> None:
            bus = await NatsBus.connect(server.url(name), process_id=name)
            stack.push_async_callback(bus.close)
            await bus.serve(subject, kind, lambda _: answer())
            await bus.flush()

        def answers(name: str) -> Callable[[], FleetRead]:
            return lambda: known_by(name, uptimes[name])

        await serve("gateway-1", READ_FLEET, ReadFleet, answers("gateway-1"))
        await serve("gateway-2", fleet("gateway-2"), ReadFleet, answers("gateway-2"))
        await serve("host-1", list_host_models("host-1"), ListHostModels, lambda: models)
        url = server.url("observer-1")
        with pytest.raises(DependencyUnavailable):  # it has just started and may not know all
            await _status(url, **ONCE, first_beat_s=FIRST_POLL_S)
        uptimes["gateway-1"] = 5.0
        await _status(url, **ONCE, first_beat_s=LIMIT_S)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("{"))
    shown = json.loads(line)
    assert shown["gateway_id"] == "gateway-2"
    assert [(each["name"], each["host_id"]) for each in shown["models"]] == [("big", "host-1")]
    assert shown["roles"][0]["num_wanted_workers"] == 2


def known_by(gateway_id: str, uptime_s: float) -> FleetRead:
    rows = (
        ProcessView(process_id=each, role="gateway", state="ready")
        for each in ("gateway-1", "gateway-2")
    )
    return FleetRead(
        gateway_id=gateway_id,
        uptime_s=uptime_s,
        processes=tuple(rows),
        redis=ServerView(state="ok"),
        nats=ServerView(state="ok"),
        hosts=(HostView(process_id="host-1", state="ready"),),
        demands=(RoleDemand(model="big", role="decode", num_wanted_workers=2),),
    )


def test_status_without_a_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    status = call_hearth(("status", "--once", "--nats-url", UNREACHABLE), {})
    assert (status.returncode, status.stdout) == (1, "")
    (line,) = status.stderr.splitlines()
    assert line.startswith("hearth: ") and "cannot reach NATS" in line
