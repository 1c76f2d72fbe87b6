"""Commands to the workers of a host: park, wake, resize. A worker gets one at a time."""

from __future__ import annotations

from typing import TypeVar

from services.host.hosted_catalogue import HostedRevision
from shared.errors import HearthError, WorkerBusy
from shared.messages import Done, KvResized, ParkWorker, ResizeKv, WakeWorker
from shared.subjects import lifecycle
from shared.transport.bus import Bus

PARK_DRAIN_S = 2.0  # that a worker waits for its requests before it refuses to park
TIMEOUT_S = 20.0  # of a command: a large cache on a device takes seconds


M = TypeVar("M", Done, KvResized)


class WorkerControl:
    """Every method raises a HearthError if the worker refuses or does not answer."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def park(self, hosted: HostedRevision) -> None:
        """Raises WorkerBusy if it still has requests."""
        await self._request(hosted, ParkWorker(drain_s=PARK_DRAIN_S), Done)

    async def wake(self, hosted: HostedRevision, kv_bytes: int) -> None:
        await self._request(hosted, WakeWorker(kv_bytes=kv_bytes), Done)

    async def resize(self, hosted: HostedRevision, kv_bytes: int) -> int:
        """Returns the bytes that the cache has now."""
        reply = await self._request(hosted, ResizeKv(kv_bytes=kv_bytes), KvResized)
        return reply.kv_bytes

    async def _request(
        self,
        hosted: HostedRevision,
        command: ParkWorker | WakeWorker | ResizeKv,
        reply_type: type[M],
    ) -> M:
        async with hosted.commands:
            if hosted.worker_id is None:
                raise HearthError(f"model {hosted.key} has no worker")
            return await self._bus.request(
                lifecycle("decode", hosted.worker_id), command, reply_type, timeout_s=TIMEOUT_S
            )


def is_refusal(error: HearthError) -> bool:
    """Whether the worker goes on as before."""
    return isinstance(error, WorkerBusy)
