"""SIGTERM: a process finishes its work before it exits, without any effect on clients."""

from __future__ import annotations

import time

import msgspec

from tests.chaos.chaos import Chaos
from tests.chaos.world.load import NUM_CLIENTS, Steady

MAX_DRAIN_S = 30.0


class Restart(msgspec.Struct, kw_only=True):
    """One process, terminated under load and restarted. Seconds."""

    process: str
    exit_status: int
    drain_s: float
    back_s: float  # from its start until every gateway had it again


async def restart_each(
    chaos: Chaos, names: list[str], *, num_clients: int = NUM_CLIENTS
) -> tuple[list[Restart], Steady]:
    """Restarts the processes in turn under load; the load records the clients' results."""
    restarts = []
    async with Steady(chaos, num_clients) as load:
        for name in names:
            restarts.append(await _restart(chaos, name))
    return restarts, load


async def _restart(chaos: Chaos, name: str) -> Restart:
    started = time.monotonic()
    chaos.cluster.terminate(name)
    status = await chaos.cluster.ended(name, MAX_DRAIN_S)
    ended = time.monotonic()
    await chaos.cluster.restart(name)
    await chaos.cluster.wait_until_ready()
    return Restart(
        process=name,
        exit_status=status,
        drain_s=round(ended - started, 3),
        back_s=round(time.monotonic() - ended, 3),
    )
