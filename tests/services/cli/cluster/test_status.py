"""`hearth status --once` on a real nats-server, with a late heartbeat or without heartbeats."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.cluster.status import FIRST_BEAT_TIMEOUT_S, FIRST_POLL_S
from shared.clock import MonotonicClock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.running import WAIT_S, start_hearth


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, (("observer", "observer-1"), ("gateway", "gateway-1")))
    yield server
    server.stop()


async def test_status_waits_for_the_first_heartbeat(tmp_path: Path, observed: NatsServer) -> None:
    status = start_hearth(
        tmp_path, "status", "--once", "--json", HEARTH_NATS_URL=observed.url("observer-1")
    )
    with pytest.raises(subprocess.TimeoutExpired):  # the command waits for a heartbeat
        status.wait(2 * FIRST_POLL_S)
    bus = await NatsBus.connect(observed.url("gateway-1"), process_id="gateway-1")
    health_monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    await health_monitor.start()
    try:
        output = await asyncio.to_thread(status.communicate, timeout=WAIT_S)
    finally:
        await health_monitor.stop()
        await bus.close()
    assert status.returncode == 0, output[0]
    assert [row["process_id"] for row in json.loads(output[0])["services"]] == ["gateway-1"]


def test_status_without_heartbeats_is_an_error(tmp_path: Path, observed: NatsServer) -> None:
    """In a pipe it looks once."""
    url = observed.url("observer-1")
    status = start_hearth(tmp_path, "status", HEARTH_NATS_URL=url)
    output, _ = status.communicate(timeout=WAIT_S)
    assert status.returncode != 0
    address = f"nats://127.0.0.1:{observed.port}"
    assert f"no heartbeat at {address} within {FIRST_BEAT_TIMEOUT_S:g} s" in output
    assert "Traceback" not in output, output
