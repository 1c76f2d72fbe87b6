"""Sends ChangeRoles to a worker that is found by its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

from services.cli.fleet.find_worker import LISTEN_S, heard_worker
from services.cli.nats_address import find_nats
from services.local.credentials import process_id_for
from shared.errors import ConfigError
from shared.lifecycle.worker_roles import roles_named
from shared.messages import ChangeRoles, Done, Heartbeat
from shared.subjects import HEARTBEATS, lifecycle
from shared.telemetry.log import configure_logging
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

CHANGE_TIMEOUT_S = 5.0


def run_role(nats_url: str | None, worker_id: str, name: str, *, is_forced: bool) -> None:
    """Changes the roles of a worker and prints the change. Raises ConfigError, the worker's
    refusal, or DependencyUnavailable.
    """
    command = ChangeRoles(roles=roles_named(name, "ROLE"))
    configure_logging("role", level="error")  # not that the connection has been closed
    url = find_nats(nats_url, "operator")
    print(asyncio.run(_change(url, worker_id, command, is_forced=is_forced)))


async def _change(nats_url: str, worker_id: str, command: ChangeRoles, *, is_forced: bool) -> str:
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("operator", nats_url),
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        return await change_roles(bus, worker_id, command, is_forced=is_forced)
    finally:
        await bus.close()


async def change_roles(
    bus: Bus, worker_id: str, command: ChangeRoles, *, is_forced: bool = False
) -> str:
    """Returns the line to print. Raises ConfigError for an unknown worker and, unless `is_forced`,
    for the last one that decodes its model; the worker's refusal; or DependencyUnavailable if it
    does not reply.
    """
    heard = await _heard_processes(bus, worker_id, command, is_forced=is_forced)
    heartbeat = heard[worker_id]
    if not is_forced and _takes_decode(heartbeat, command) and not _others(heartbeat, heard):
        name = "its model" if heartbeat.model is None else heartbeat.model.name
        raise ConfigError(
            f"{worker_id} is the last worker that decodes {name}: without it no request is served;"
            " --force changes it all the same"
        )
    subject = lifecycle(heartbeat.roles[0], worker_id)
    await bus.request(subject, command, Done, timeout_s=CHANGE_TIMEOUT_S)
    return f"{worker_id}: {'+'.join(heartbeat.roles)} → {'+'.join(command.roles)}"


async def _heard_processes(
    bus: Bus, worker_id: str, command: ChangeRoles, *, is_forced: bool
) -> dict[str, Heartbeat]:
    """Listens until the change can be decided, or for LISTEN_S. Returns the last heartbeat of each
    process, that of the worker among them.
    """
    heard: dict[str, Heartbeat] = {}
    is_enough = asyncio.Event()

    def on_heartbeat(beat: Heartbeat) -> None:
        heard[beat.process_id] = beat
        own = heard.get(worker_id)
        if own is not None and (
            is_forced or not _takes_decode(own, command) or _others(own, heard)
        ):
            is_enough.set()

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            await is_enough.wait()
    await leave()
    heard_worker(worker_id, heard)
    return heard


def _takes_decode(worker: Heartbeat, command: ChangeRoles) -> bool:
    return "decode" in worker.roles and "decode" not in command.roles


def _others(worker: Heartbeat, heard: Mapping[str, Heartbeat]) -> list[Heartbeat]:
    """Returns the other workers that decode the same model."""
    name = worker.model and worker.model.name
    return [
        each
        for each in heard.values()
        if each.process_id != worker.process_id
        and each.state == "ready"
        and "decode" in each.roles
        and each.model is not None
        and each.model.name == name
    ]
