"""A second process with the name of one that serves, on a real NATS server."""

from __future__ import annotations

import asyncio
import os
import sys

from shared.clock import MonotonicClock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.process import HEARTH_ERROR_STATUS
from shared.randomness import SystemRandomness
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S

TIMEOUT_S = LIMIT_S
NAME = "kv_index-1.taken"
COMMAND = ["-m", "services", "kv-index", "--process-id", "kv_index-1", "--instance", "taken"]


async def test_second_process_with_a_name_ends_with_a_line_that_says_why(
    nats_server: NatsServer,
) -> None:
    url = nats_server.url(NAME)
    bus = await NatsBus.connect(url, process_id=NAME)
    first = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("kv_index",))
    await first.start()
    environ = {"HEARTH_NATS_URL": url, "HEARTH_REDIS_URL": "redis://127.0.0.1:1/0"}
    second = await asyncio.create_subprocess_exec(
        sys.executable, *COMMAND, env={**os.environ, **environ}, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, err = await second.communicate()
    finally:
        if second.returncode is None:
            second.kill()
        await first.stop()
        await bus.close()
    assert second.returncode == HEARTH_ERROR_STATUS
    line = err.decode().splitlines()[-1]
    assert line.startswith(f"{NAME}: another process on ")
    assert line.endswith(f"uses the name {NAME}: stop it, or give this one a name of its own")
