"""`hearth status --once`: with a late heartbeat, without heartbeats and without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.cluster import status as module
from services.cli.cluster.status import _status
from shared.clock import MonotonicClock
from shared.errors import DependencyUnavailable
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.services.cli.in_process import call_hearth
from tests.support.servers import NatsServer

FIRST_POLL_S = 0.05
ONCE = {"is_once": True, "is_json": True, "interval_s": 1.0, "first_poll_s": FIRST_POLL_S}
UNREACHABLE = "nats://o:word@127.0.0.1:9"
USERS = (("observer", "observer-1"), ("gateway", "gateway-1"))


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


def test_status_without_a_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    status = call_hearth(("status", "--once", "--nats-url", UNREACHABLE), {})
    assert (status.returncode, status.stdout) == (1, "")
    (line,) = status.stderr.splitlines()
    assert line.startswith("hearth: ") and "cannot reach NATS" in line
