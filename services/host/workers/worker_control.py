"""Commands to the workers of a host: park, wake, resize. A worker gets one at a time.

Each may be sent again: a worker that has carried it out replies at once. So a reply that is lost,
as all are that arrive while this host is frozen, makes no worker count as hung.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

from services.host.hosted_revisions import HostedRevision
from shared.errors import HearthError, RequestTimeout, WorkerBusy
from shared.messages import (
    Done,
    DrainState,
    DrainWorker,
    KvResized,
    ParkWorker,
    ResizeKv,
    WakeWorker,
)
from shared.subjects import lifecycle
from shared.transport.bus import Bus

PARK_DRAIN_S = 2.0  # a worker with requests refuses to park after this
TRY_S, MAX_TRIES = 5.0, 4  # limits of a command: a large cache on a device takes seconds
BYTES_PER_TRY = 5 << 30  # of weights that a park offloads: at first a second for each GiB


M = TypeVar("M", Done, KvResized, DrainState)


class WorkerControl:
    """Commands to workers. Every method raises a HearthError if the worker rejects it or
    does not reply.
    """

    def __init__(self, bus: Bus, *, try_s: float = TRY_S) -> None:
        self._bus = bus
        self._try_s = try_s

    async def park(self, hosted: HostedRevision, offloaded_bytes: int = 0) -> None:
        """Parks the worker of a model. Raises WorkerBusy if it still has requests."""
        tries = MAX_TRIES + offloaded_bytes // BYTES_PER_TRY
        await self._request(hosted, ParkWorker(drain_s=PARK_DRAIN_S), Done, tries)

    async def wake(self, hosted: HostedRevision, kv_bytes: int) -> None:
        await self._request(hosted, WakeWorker(kv_bytes=kv_bytes), Done)

    async def resize(self, hosted: HostedRevision, kv_bytes: int) -> int:
        """Returns the bytes that the cache has now."""
        reply = await self._request(hosted, ResizeKv(kv_bytes=kv_bytes), KvResized)
        return reply.kv_bytes

    async def drain(self, hosted: HostedRevision, command: DrainWorker) -> DrainState:
        return await self._request(hosted, command, DrainState, tries=1)

    async def _request(
        self,
        hosted: HostedRevision,
        command: ParkWorker | WakeWorker | ResizeKv | DrainWorker,
        reply_type: type[M],
        tries: int = MAX_TRIES,
    ) -> M:
        """Sends the command to the model's present worker and returns its reply.

        Raises HearthError if that worker has ended or was replaced, RequestTimeout after the last
        of `tries`.
        """
        worker_id = hosted.worker_id
        async with hosted.commands:
            for _ in range(tries):
                if worker_id is None or hosted.worker_id != worker_id:
                    raise HearthError(f"the worker of model {hosted.key} has ended")
                with contextlib.suppress(RequestTimeout):
                    return await self._bus.request(
                        lifecycle("decode", worker_id), command, reply_type, timeout_s=self._try_s
                    )
        raise RequestTimeout(f"worker {worker_id} has not replied to {tries} commands")


def is_refusal(error: HearthError) -> bool:
    """Whether the worker goes on as before."""
    return isinstance(error, WorkerBusy)
