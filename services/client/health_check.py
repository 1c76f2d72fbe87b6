"""Checks whether the fleet sees a process as alive: receives its heartbeat through NATS.

A health check inside a container knows its credential only, which other containers may share: the
reply to ReportAlive tells on which host a process is.
"""

from __future__ import annotations

import asyncio
import os
from socket import gethostname

from shared.errors import ConfigError, HearthError
from shared.messages import Alive, Heartbeat, ReportAlive
from shared.nats_urls import user_of
from shared.subjects import HEARTBEATS, alive, credential_of, process_id_of, random_instance
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

ALIVE_TIMEOUT_S = 1.0


async def receives_heartbeat(
    nats_url: str, process_id: str, *, timeout_s: float, is_on_this_host: bool = False
) -> bool:
    """Returns True once a `ready` heartbeat arrives from `process_id`, or from a process of that
    credential. Raises DependencyUnavailable.
    """
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_of(credential_of(process_id), random_instance()),
        timeout_s=timeout_s,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    ready: asyncio.Queue[Heartbeat] = asyncio.Queue()

    def on_heartbeat(message: Heartbeat) -> None:
        names = (message.process_id, credential_of(message.process_id))
        if process_id in names and message.state == "ready":
            ready.put_nowait(message)

    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
        async with asyncio.timeout(timeout_s):
            while is_on_this_host and not await _is_on_this_host(bus, await ready.get()):
                pass
            if not is_on_this_host:
                await ready.get()
    except TimeoutError:
        return False
    finally:
        await bus.close()
    return True


async def _is_on_this_host(bus: NatsBus, heartbeat: Heartbeat) -> bool:
    subject = alive(heartbeat.roles[0], heartbeat.process_id)
    try:
        reply = await bus.request(subject, ReportAlive(), Alive, timeout_s=ALIVE_TIMEOUT_S)
    except HearthError:
        return False
    return reply.host == gethostname()


def run_probe(nats_url: str, process_id: str | None, *, timeout_s: float) -> bool:
    """Probes a process. Raises ConfigError if no process id is given."""
    name = user_of(nats_url) if process_id is None else process_id
    if not name:
        raise ConfigError("--process-id is needed where the NATS URL has no user")
    return asyncio.run(
        receives_heartbeat(nats_url, name, timeout_s=timeout_s, is_on_this_host=process_id is None)
    )
