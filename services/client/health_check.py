"""Checks whether the fleet sees a process as alive: receives its heartbeat through NATS."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.transport.bus import NatsBus


async def receives_heartbeat(nats_url: str, process_id: str, *, timeout_s: float) -> bool:
    """True once a `ready` heartbeat of `process_id` arrives. Raises DependencyUnavailable."""
    bus = await NatsBus.connect(nats_url, process_id=process_id, timeout_s=timeout_s)
    received = asyncio.Event()

    def on_heartbeat(message: Heartbeat) -> None:
        if message.process_id == process_id and message.state == "ready":
            received.set()

    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
        async with asyncio.timeout(timeout_s):
            await received.wait()
    except TimeoutError:
        return False
    finally:
        await bus.close()
    return True


def run_probe(nats_url: str, process_id: str | None, *, timeout_s: float) -> bool:
    """Raises ConfigError if no process id is given."""
    name = urlsplit(nats_url).username if process_id is None else process_id
    if not name:
        raise ConfigError("--process-id is needed where the NATS URL has no user")
    return asyncio.run(receives_heartbeat(nats_url, name, timeout_s=timeout_s))
