"""Subscribes to the cluster's bus, and records the time of each message.

It receives publications, but subscribes to no subject of requests: a subscriber there would count
as a responder, and the services rely on the absence of responders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.messages import (
    AbortRequest,
    AckFinished,
    CancelQueued,
    Heartbeat,
    KvEvents,
    Placed,
    PlacementFailed,
    PrefillFailed,
    PrefillPhases,
    QueueKeepalive,
    RenewLease,
    TokenBatch,
)
from shared.subjects import HEARTBEATS, KV_EVENTS, command
from shared.transport.bus import NatsBus
from tests.support.cluster.chaos_cluster import MONITOR, ChaosCluster
from tests.support.waiting import until_changed

_PLACEMENT = Placed | PlacementFailed | QueueKeepalive
_CONTROL = AbortRequest | AckFinished | RenewLease | PrefillFailed | PrefillPhases


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    at: float
    subject: str
    message: Any


@dataclass
class Monitor:
    recorded: list[RecordedMessage] = field(default_factory=list)
    newest: dict[str, Heartbeat] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _bus: NatsBus | None = None

    async def start(self, cluster: ChaosCluster) -> None:
        bus = self._bus = await NatsBus.connect(cluster.nats_url, process_id=MONITOR)
        await bus.subscribe(HEARTBEATS, Heartbeat, self._record_heartbeat)
        for name, role in cluster.services.items():
            recorder = self._recorder(name)
            if role == "gateway":
                await bus.subscribe(
                    command(role, name, "placement"), _PLACEMENT, self._recorder(f"{name}")
                )
                await bus.subscribe(
                    command(role, name, "tokens"), TokenBatch, self._recorder(f"{name}")
                )
            elif role in ("decode", "prefill"):
                await bus.subscribe(command(role, name, "control"), _CONTROL, recorder)
            elif role == "scheduler":
                await bus.subscribe(
                    command(role, name, "cancel"), CancelQueued, self._recorder(name)
                )
        await bus.subscribe(KV_EVENTS, KvEvents, lambda each: self._record(each.worker_id, each))
        await bus.flush()

    async def stop(self) -> None:
        if self._bus is not None:
            await self._bus.close()

    def forget(self) -> None:
        self.recorded.clear()

    def of(self, kind: type, name: str | None = None) -> list[RecordedMessage]:
        return [
            each
            for each in self.recorded
            if isinstance(each.message, kind) and name in (None, each.subject)
        ]

    async def wait(self, condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
        """Waits until `condition` returns a true result and returns it. Raises NotReached."""

        def loads() -> dict[str, object]:
            return {name: (each.state, each.load) for name, each in self.newest.items()}

        return await until_changed(condition, self._changed, timeout_s=timeout_s, seen=loads)

    def _recorder(self, name: str) -> Callable[[Any], None]:
        return lambda message: self._record(name, message)

    def _record(self, name: str, message: Any) -> None:
        self.recorded.append(RecordedMessage(time.monotonic(), name, message))
        self._changed.set()

    def _record_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.newest[heartbeat.process_id] = heartbeat
        self._changed.set()


def is_empty(heartbeat: Heartbeat) -> bool:
    """Whether a worker is idle with all its blocks: free and cached blocks are all blocks."""
    load = heartbeat.load
    if load is None:
        return True
    busy = load.num_running + load.num_waiting + load.num_reserved_blocks
    return busy == 0 and load.num_free_blocks == load.num_total_blocks
