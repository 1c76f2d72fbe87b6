"""Reports a process's state to its own probes and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.messages import Heartbeat

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The state of a process. If it `takes_work`, it would accept a request now. `own` are metrics
    besides those that heartbeats make; any thread may collect them.
    """

    heartbeat: Heartbeat
    takes_work: bool
    own: Collector | None = None
