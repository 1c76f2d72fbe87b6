"""Finds a worker by its heartbeat, for a command to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.transport.bus import Bus

LISTEN_S = 6 * HEARTBEAT_INTERVAL_S  # waits for the heartbeats of the worker and of others


async def find_worker(bus: Bus, worker_id: str) -> Heartbeat:
    """Returns a heartbeat of the worker. Raises ConfigError for an unknown worker, and
    DependencyUnavailable without any heartbeat, and for a worker that starts.
    """
    heard: dict[str, Heartbeat] = {}
    is_found = asyncio.Event()

    def on_heartbeat(beat: Heartbeat) -> None:
        heard[beat.process_id] = beat
        if beat.process_id == worker_id and beat.load is not None:
            is_found.set()

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            await is_found.wait()
    await leave()
    return heard_worker(worker_id, heard)


def heard_worker(worker_id: str, heard: Mapping[str, Heartbeat]) -> Heartbeat:
    """Returns the worker's heartbeat of these. Raises as `find_worker`."""
    if not heard:
        raise DependencyUnavailable(f"no heartbeat within {LISTEN_S:g} s: is the cluster running?")
    found = heard.get(worker_id)
    if found is not None and found.starting is not None:
        raise DependencyUnavailable(f"{worker_id} is still starting: wait until it is ready")
    if found is None or found.load is None:
        workers = sorted(each.process_id for each in heard.values() if each.load is not None)
        raise ConfigError(
            f"no worker {worker_id!r}; the workers are: {', '.join(workers) or 'none'}"
        )
    return found
