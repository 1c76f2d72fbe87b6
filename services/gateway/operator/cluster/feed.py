"""The stream of deltas of `GET /v1/cluster/events`: one computation a second for all readers.

Nothing is computed while nobody reads. A loss is sent at once. A reader that was too slow and
missed a delta gets a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from services.gateway.operator.cluster.state import ClusterView
from shared.background import Background, failing_alone
from shared.lifecycle.health import Loss
from shared.messages import Heartbeat

INTERVAL_S = 1.0
MAX_READERS = 256
_encode = msgspec.json.Encoder().encode


class ClusterFeed:
    def __init__(self, state: ClusterView) -> None:
        self.state = state
        self._num_readers = 0
        self._number = 0
        self._event = b""
        self._changed = asyncio.Condition()
        self._urgent = asyncio.Event()
        self._is_closed = False
        self._background = Background()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._num_readers >= MAX_READERS

    def observe(self, heartbeat: Heartbeat) -> None:
        self.state.observe(heartbeat)
        if heartbeat.state == "stopped":
            self._urgent.set()

    def lose(self, process_id: str, loss: Loss) -> None:
        self.state.lose(process_id, loss)
        self._urgent.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yields server-sent events, a snapshot and then deltas, until the reader leaves or `close`
        is called.
        """
        self._num_readers += 1
        if self._task is None:
            self._number = self.state.delta().number
            self._task = self._background.start_own(self._run())
        try:
            number = -1
            while not self._is_closed:
                if number >= 0 and self._number == number + 1:
                    event = self._event
                elif self._number != number:
                    event = _sse("snapshot", self.state.last())
                else:
                    event = b""
                number = self._number
                if event:
                    yield event
                async with self._changed:
                    if self._number == number and not self._is_closed:
                        await self._changed.wait()
        finally:
            self._num_readers -= 1
            if self._num_readers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def close(self) -> None:
        """Ends all readers, so that a stop of the process does not wait for open browser tabs."""
        self._is_closed = True
        await self._background.stop()
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        while True:
            self._urgent.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), INTERVAL_S)
            with failing_alone("cluster_delta_not_sent"):
                await self._send_delta()

    async def _send_delta(self) -> None:
        delta = self.state.delta()
        async with self._changed:
            self._number, self._event = delta.number, _sse("delta", delta)
            self._changed.notify_all()


def _sse(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
