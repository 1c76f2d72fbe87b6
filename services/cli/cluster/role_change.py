"""Sends ChangeRoles to a worker that is found by its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import os

from services.cli.cluster.status import find_nats
from services.local.credentials import process_id_for
from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.lifecycle.worker_roles import roles_named
from shared.log import configure_logging
from shared.messages import ChangeRoles, Done, Heartbeat
from shared.subjects import HEARTBEATS, lifecycle
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

LISTEN_S = 6 * HEARTBEAT_INTERVAL_S  # waits for the worker's heartbeat
CHANGE_TIMEOUT_S = 5.0


def run_role(nats_url: str | None, worker_id: str, name: str) -> None:
    """Changes the roles of a worker and prints the change. Raises ConfigError, the worker's
    refusal, or DependencyUnavailable.
    """
    command = ChangeRoles(roles=roles_named(name, "ROLE"))
    configure_logging("role", level="error")  # not that the connection has been closed
    print(asyncio.run(_change(find_nats(nats_url, "operator"), worker_id, command)))


async def _change(nats_url: str, worker_id: str, command: ChangeRoles) -> str:
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("operator", nats_url),
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        return await change_roles(bus, worker_id, command)
    finally:
        await bus.close()


async def change_roles(bus: Bus, worker_id: str, command: ChangeRoles) -> str:
    """Returns the line to print. Raises ConfigError for an unknown worker, the worker's refusal, or
    DependencyUnavailable if it does not reply.
    """
    heartbeat = await _heartbeat_of(bus, worker_id)
    subject = lifecycle(heartbeat.roles[0], worker_id)
    await bus.request(subject, command, Done, timeout_s=CHANGE_TIMEOUT_S)
    return f"{worker_id}: {'+'.join(heartbeat.roles)} → {'+'.join(command.roles)}"


async def _heartbeat_of(bus: Bus, worker_id: str) -> Heartbeat:
    known: dict[str, Heartbeat] = {}
    has_it = asyncio.Event()

    def on_heartbeat(beat: Heartbeat) -> None:
        known[beat.process_id] = beat
        if beat.process_id == worker_id:
            has_it.set()

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            await has_it.wait()
    await leave()
    if not known:
        raise DependencyUnavailable(f"no heartbeat within {LISTEN_S:g} s: is the cluster running?")
    if worker_id not in known:
        raise ConfigError(_unknown(worker_id, known))
    return known[worker_id]


def _unknown(worker_id: str, known: dict[str, Heartbeat]) -> str:
    workers = sorted(each.process_id for each in known.values() if each.load is not None)
    return f"no worker {worker_id!r}; the workers are: {', '.join(workers) or 'none'}"
