"""`hearth status --once`: with a late heartbeat, without heartbeats and without a server. Each of
them waits for seconds: all at the same time.
"""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from services.cli.cluster.status import FIRST_BEAT_TIMEOUT_S, FIRST_POLL_S
from shared.clock import MonotonicClock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.running import WAIT_S, start_hearth

USERS = (("observer", "observer-1"), ("gateway", "gateway-1"))
UNREACHABLE = "nats://o:word@127.0.0.1:9"


async def test_status_waits_for_a_heartbeat_and_for_a_server(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    late, silent = NatsServer(tmp_path / "late", USERS), NatsServer(tmp_path, USERS)
    try:
        await asyncio.gather(
            waits_for_the_first_heartbeat(tmp_path, late),
            fails_without_heartbeats(tmp_path, silent),
            fails_without_a_server(tmp_path),
        )
    finally:
        late.stop()
        silent.stop()


async def waits_for_the_first_heartbeat(state_home: Path, server: NatsServer) -> None:
    url = server.url("observer-1")
    status = start_hearth(state_home, "status", "--once", "--json", HEARTH_NATS_URL=url)
    with pytest.raises(subprocess.TimeoutExpired):  # the command waits for a heartbeat
        await asyncio.to_thread(status.wait, 2 * FIRST_POLL_S)
    bus = await NatsBus.connect(server.url("gateway-1"), process_id="gateway-1")
    health_monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("gateway",))
    await health_monitor.start()
    try:
        output = await ended(status)
    finally:
        await health_monitor.stop()
        await bus.close()
    assert status.returncode == 0, output
    assert [row["process_id"] for row in json.loads(output)["services"]] == ["gateway-1"]


async def fails_without_heartbeats(state_home: Path, server: NatsServer) -> None:
    """In a pipe it looks once."""
    status = start_hearth(state_home, "status", HEARTH_NATS_URL=server.url("observer-1"))
    output = await ended(status)
    assert status.returncode != 0
    address = f"nats://127.0.0.1:{server.port}"
    assert f"no heartbeat at {address} within {FIRST_BEAT_TIMEOUT_S:g} s" in output
    assert "Traceback" not in output, output


async def fails_without_a_server(state_home: Path) -> None:
    status = start_hearth(state_home, "status", "--once", "--nats-url", UNREACHABLE)
    output = await ended(status)
    assert status.returncode == 2
    assert len(output.splitlines()) == 1
    assert output.startswith("hearth: ") and "cannot reach NATS" in output


async def ended(status: subprocess.Popen[str]) -> str:
    """Its output."""
    output, _ = await asyncio.to_thread(status.communicate, timeout=WAIT_S)
    return output
